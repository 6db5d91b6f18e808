"""The compilation of one graph. `compile_graph` shows all of it, for a whole graph, a region and a capture."""
