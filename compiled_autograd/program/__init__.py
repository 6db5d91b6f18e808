"""What compilers make of a captured graph, and how it runs."""
