"""Sessions: which compiler is enabled on which thread."""
