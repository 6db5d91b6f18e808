"""Compile one graph. ``compile_graph`` shows every step, for a whole graph, a region and a capture."""
