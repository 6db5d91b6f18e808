"""Parts of a compilation: options, observers, compilers of the partitioned graphs, and the history of compilations.

* ``options``: what the user may set; ``observing``: the protocols of checks and reports
* ``graph_compilers``: the compilers, Inductor among them; ``shared_kernels``: a graph's C++ kernels in one unit
* ``compiled_segments``, ``ordered``: graphs around calls that are already compiled, and around overlapped messages
* ``isolation``, ``fixed_sizes``: what runs instead of calls and graphs that Inductor cannot lower
* ``backward_capture``: the ``compiled_autograd`` option; ``inductor_rng``, ``saved_code``: graphs that run in
  eager, and compiled ones that torch saves
* ``factors``, ``environment``, ``history``: what decides a compilation, and how it differs from earlier ones
* ``unmatched``: warnings about passes that changed nothing
"""
