"""The dispatch cache: keys of calls, recipes for their outputs, and where these are kept (memory, disk).

* ``cached_dispatch``: hits and misses, with the ``Engine`` that joins the rest
* ``key``: keys, and the template of the handler that answers a hit; ``subgraphs``: keys of operators that take graphs
* ``recipe``, ``record_recipe``: recipes, and recording them; ``calls``: which calls may be cached
* ``symbolic`` and ``symbolic_*``, ``expressions``, ``links``, ``normalized``, ``evaluations``: the same for
  symbolic sizes
* ``store``, ``disk``: where entries are kept; ``replacements``: what invalidates them
"""
