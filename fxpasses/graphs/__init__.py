"""Graphs: which values share memory, where nodes come from, new nodes that keep metadata."""
