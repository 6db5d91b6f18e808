"""The compilation of one graph. `compile_graph` shows all of it, for a whole graph, a region and a capture.

``fxpasses/compile_frame.py`` calls it for a Dynamo graph, with the checks, reports and recording that the options
ask for. ``compile_graph`` puts the stages in order, ``stages`` has a method for each, and ``capture_graphs`` is
`fxpasses.capture`.
"""
