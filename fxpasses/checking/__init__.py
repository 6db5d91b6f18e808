"""Checks of rewrites: is the graph after a pass still the same program, and if not, which rewrite is to blame?

The steps of a check during compilation, in order:

1. ``watch`` keeps the graphs before and after each pass, and waits for the first calls of the compiled
function. (``findings`` does the same for one given rewrite.)
2. ``checked_calls`` decides on which inputs to check each rewrite: real ones, ``inputs`` made from them, and
values that expose differences: ``critical_inputs`` and ``critical_values`` (with ``compared_numbers``,
``free_values``, ``crossings``, ``tied_values``, ``masked_rows``, ``losing_values``, ``overflow``; ``both_sides``
runs only what depends on them).
3. ``interpret`` runs graphs call by call: in their own dtypes, in float64, and with ``collectives`` as
several processes. ``carried`` runs only what a pass changed.
4. ``windows`` cuts what a pass changed out of both graphs.
5. ``values`` compares both sides. Where bits differ, ``same_function`` asks whether they are one function
(``computed_constants``, ``nested_graphs``, ``fused_kernels`` and ``nan_guards`` are special cases,
``unreachable`` finds differences that no input shows, ``open_order`` results that PyTorch leaves open), and
``rounding`` whether the rewrite rounds worse (``computing_types``: in which dtypes).
6. ``blame`` traces a difference to a match site and a node, ``reduce`` shrinks the graph, ``repro`` (with
``source`` and ``fake_values``) writes it to a file.

A whole model, stage by stage: ``model`` runs it in the ways of ``model_steps``; ``captured`` checks the
capture, ``joint_graph`` the partition, ``region_check`` and ``region_calls`` repeated layers, ``lowered``
Inductor; ``staged`` shrinks programs. A script: ``bisection``, in forks of a ``warm_process``, with the
statistics of ``failure_rate``; ``progress`` shows the current step.

The structure check, without values, is part of running a pass: ``fxpasses.pass_manager.structure``.
"""
