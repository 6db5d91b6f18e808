"""Exact checking: decide without a tolerance whether two graphs are the same function of real numbers.

* :func:`equivalent`: the verdict on two graphs; :class:`Original`: on many that are to replace one
* ``fields``, ``float_constants``, ``arithmetic``: dual numbers, a float64 witness with residues modulo primes
* ``rules``: ATen's operators on them
* ``machine``, ``run``, ``same_values``: evaluating calls and graphs, comparing results
* ``samples``: the inputs that are tried

Knows nothing of passes.
"""

from fxpasses.exact.verdict import Finding, Original, Verdict, equivalent

__all__ = ["Finding", "Original", "Verdict", "equivalent"]
