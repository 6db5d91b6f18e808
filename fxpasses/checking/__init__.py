"""Checks of graphs: is what a pass made of a graph still the same program, and if not, which rewrite is to blame?

* ``structure``: is the graph well formed, with the metadata it had? Without running it.
* ``values``: both graphs run on the same inputs; where bits differ, ``same_function`` asks in exact arithmetic, and ``less_precise`` whether the
  rewrite rounds worse than the graph before, in multiples of what rounding does at no fault (``rounding``).
* ``blame``, ``reduce``, ``repro``: from a difference to a pass, a match site, a node, and a small file that shows it.
* ``bisect``: which stage, pass and site break a script, in processes of their own.
* ``model``: a whole model, stage by stage.
"""
