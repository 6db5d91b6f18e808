"""Exact checking: decide without a tolerance whether two graphs are the same function of real numbers.

* :func:`equivalent`: the verdict on two graphs; :class:`Original`: on many that are to replace one
* ``fields``, ``float_constants``, ``arithmetic``: dual numbers, a float64 witness with residues modulo primes
* ``angles``, ``sums``, ``products``, ``complex_values``: identities that residues alone do not know
* ``rules``: ATen's operators on them
* ``machine``, ``run``, ``same_values``: evaluating calls and graphs, comparing results; ``time_limit`` ends them
* ``samples``, ``bounds``: the inputs that are tried; ``ranges``: the values that they can lead to
* ``folded_numbers``, ``rounded_constants``: numbers and tensors that a rewrite computed from others

Knows nothing of passes.
"""

from fxpasses.exact.verdict import Finding, Original, Verdict, equivalent

__all__ = ["Finding", "Original", "Verdict", "equivalent"]
