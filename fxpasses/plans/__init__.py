"""Plans: the result of a compilation on disk, with everything that decided it. A later process runs it without compiling.

::

    cold   walk (content of model and arguments) ── torch.compile, recorded ── plan ── file
    warm   walk ── file found by its digest ── checks of the plan ── code and kernels loaded ── run

* ``compile`` (``Compiled.__call__``: each call, with or without a plan), ``entry`` for ``torch.compile``, ``portable``
  for ``save`` and ``load``
* ``walks``: what a plan depends on. ``objects`` and ``tensors`` are what they meet; ``inputs`` what a call brings along
* ``recording``: a compilation becomes a plan; ``graph_breaks``: Dynamo's code between graphs, and what it calls
* ``files``: plans on disk
* ``running``: plans that are loaded, checked and called

The check before a call: ``WalkedModel.call`` in ``running/walked_model``, ``Plan.holds`` in ``running/plan``,
``Watch.holds`` in ``objects/watched_state``, ``tensors/same_tensors``; ``native`` is the same in C.
"""
