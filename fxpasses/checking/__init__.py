"""Checks of rewrites: is the graph after a pass still the same program, and if not, which rewrite is to blame?

The steps of a check during compilation, in order:

1. ``watch`` keeps the graphs before and after each pass, and waits for the first calls of the compiled
function. (``findings`` does the same for one given rewrite, ``region_check`` for a repeated layer.)
2. ``checked_calls`` decides on which inputs to check each rewrite: real ones, and ``critical`` values, made to
expose differences.
3. ``execution`` runs graphs call by call: in their own dtypes, in float64, and as several processes.
4. ``comparison`` cuts what a pass changed out of both graphs and asks whether both sides are one function, and
whether the rewrite rounds worse.
5. ``faults`` traces a difference to a match site and a node, shrinks the graph, and writes it to a file.

A whole model, stage by stage: ``model`` goes through the ``stages``. A script: ``bisecting``.

The structure check, without values, is part of running a pass: ``fxpasses.pass_manager.structure``.
"""
