"""Plans: the result of a compilation on disk, with everything that decided it. A later process runs it without compiling.

::

    cold   walk (content of model and arguments) ── torch.compile, recorded ── plan ── file
    warm   walk ── file found by its digest ── checks of the plan ── code and kernels loaded ── run
"""
