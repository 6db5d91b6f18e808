"""Plans: what a compilation made, kept on disk with all that decided it, so that a later process runs it without compiling.

::

    cold   walk (content of model and arguments) ── torch.compile, recorded ── plan ── file
    warm   walk ── file found by its digest ── checks of the plan ── code and kernels loaded ── run
"""
