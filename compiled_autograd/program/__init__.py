"""How captured graphs are compiled and run.

``cached_graph`` is an entry of C++'s cache. ``program`` compiles it on its first run: ``segments`` splits it at
calls of user code, ``lower`` records each segment as ATen, and ``shapes`` finds the sizes to make symbolic.
``cudagraphs`` decides what CUDA graphs can replay, and ``persist`` writes a captured graph to a file.
"""
