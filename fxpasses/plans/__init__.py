"""Plans: the result of a compilation on disk, with everything that decided it. A later process runs it without compiling.

::

    cold   walk (content of model and arguments) ── torch.compile, recorded ── plan ── file
    warm   walk ── file found by its digest ── checks of the plan ── code and kernels loaded ── run

* *Entry:* ``compile`` (``Compiled.__call__``: each call, with or without a plan), ``entry`` for
  ``torch.compile``, ``portable`` for ``save`` and ``load``
* *Walks, what a plan depends on:* ``walk``, with ``kinds``, ``open_objects``, ``said_facts``, ``tensor_facts``,
  ``shards``, ``process_groups``; ``reads``, ``code``, ``unseen``, ``origin``, ``replaced``, ``library_operators`` for
  code; ``arguments``, ``given_numbers``, ``named_attributes`` for values; ``surroundings`` for the rest;
  ``reusable_walks``
* *Recording:* ``recording``, with ``recorded_inputs``, ``recorded_trace``, ``recorded_frames``,
  ``recorded_forward``, ``results``; ``generated`` writes the code, ``temporaries`` what it makes once;
  ``written_again`` updates it
* *Frames:* ``frames``, ``resumed``, ``between``: Dynamo's code between graphs, and what it calls
* *Files:* ``plan_files``, ``archive``; ``loaded`` finds and loads them
* *Check before a call:* ``WalkedModel.call`` in ``walked_model``, ``Plan.holds`` in ``plan``, ``Watch.holds`` in
  ``watched_state``, ``same_tensors``; ``native`` is the same in C
* *Run:* ``plan``, ``runtime``, ``forward_alone``; ``shared_memory``, ``held_views``, ``exchanged``,
  ``parameter_gradients`` for tensors that are not plain inputs
"""
