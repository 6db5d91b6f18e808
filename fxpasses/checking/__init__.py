"""Checks of rewrites: is the graph after a pass still the same program, and if not, which rewrite is to blame?

One check of a compilation, in its order:

1. ``watch`` keeps the graphs before and after each pass, and waits for the first calls of what is compiled. (``findings`` does the same for one
   rewrite at hand.)
2. ``checked_calls`` decides on which inputs each rewrite is looked at: real ones and ``inputs`` made of them, ``critical_values`` for what a pass changed of a table
   or constant, and for what is compared inside of a graph.
3. ``interpret`` runs graphs call by call: in their types, in float64, with ``collectives`` as several processes; ``carried`` runs what a pass changed only.
4. ``windows`` are what a pass changed, cut out of both graphs.
5. ``values`` compares both sides. Where bits differ, ``same_function`` asks whether they are one function (``computed_constants`` and
   ``nested_graphs`` are cases of their own, ``unreachable`` says which differences no input shows), and ``rounding`` whether the rewrite rounds worse.
6. ``blame`` goes from a difference to a match site and a node, ``reduce`` cuts the graph down, ``repro`` (with ``source`` and ``fake_values``) writes it to a file.

A whole model, stage by stage: ``model`` runs it in the ways of ``model_steps``; ``captured`` judges the capture, ``joint_graph`` the partition,
``region_check`` and ``region_calls`` repeated layers, ``lowered`` Inductor; ``staged`` cuts programs down. A script: ``bisection``, in forks of a
``warm_process``, with the statistics of ``failure_rate``; ``progress`` says what it is at.
"""
