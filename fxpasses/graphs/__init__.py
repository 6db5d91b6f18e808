"""Graph utilities: aliasing, provenance of nodes, and new nodes that keep metadata."""
