"""Capture: record what C++ reports about a backward pass, and turn it into an FX graph.

``compiled_autograd.engine.run_pass`` calls these in order: ``recorder`` gets one call from C++ for each action
of a node and each hook, and stores ``captured_steps``; ``symbols`` stand for sizes and scalars meanwhile, and
``aot`` inlines backward graphs of compiled functions. ``build`` writes the steps as a graph, and
``cache_misses`` says why no earlier graph served.
"""
