"""Dual numbers: a float tensor as a float64 witness and residues.

The witness decides what depends on the value: comparisons, orders, indices, branches, whether a value is NaN
or infinite. The residues decide whether two values are the same function of the inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Terms:
    """The terms that a tensor is a sum of, computed on demand.

    Args:
        compute: computes the terms.
        depth: how many such computations are nested.
    """

    __slots__ = ("_cached", "_compute", "depth")

    def __init__(self, compute: Callable[[], list[Dual]], depth: int = 1) -> None:
        self._compute, self.depth = compute, depth
        self._cached: list[Dual] | None = None

    def __call__(self) -> list[Dual]:
        """Return the terms."""
        if self._cached is None:
            self._cached = self._compute()
        return self._cached


class Dual:
    """A float tensor.

    Attributes:
        witness: float64, with the shape of the tensor.
        residues: one int64 tensor per level, of the same shape; 0 where the witness is not finite.
        dtype: the dtype that the tensor has in the graph; ``None`` for a Python number.
        exponential: computes its ``exp`` if it is made of a logarithm, whose residues do not determine a
            sign.
        square: computes its square if it is made of a root, likewise.
        terms: computes the terms of the sum it is, if sines of sums are computed from their terms.
    """

    __slots__ = ("_exponential", "_square", "dtype", "residues", "terms", "witness")

    def __init__(
        self,
        witness: Tensor,
        residues: Sequence[Tensor],
        dtype: torch.dtype | None = torch.float32,
        exponential: Callable[[], Dual] | None = None,
        square: Callable[[], Dual] | None = None,
        terms: Terms | None = None,
    ) -> None:
        self.witness = witness
        self.residues = list(residues)
        self.dtype = dtype
        self.exponential, self.square, self.terms = exponential, square, terms

    @property
    def exponential(self) -> Callable[[], Dual] | None:
        return self._exponential

    @exponential.setter
    def exponential(self, compute: Callable[[], Dual] | None) -> None:
        self._exponential = _once(compute)

    @property
    def square(self) -> Callable[[], Dual] | None:
        return self._square

    @square.setter
    def square(self, compute: Callable[[], Dual] | None) -> None:
        self._square = _once(compute)

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor."""
        return self.witness.shape

    def dim(self) -> int:
        """The number of dimensions."""
        return self.witness.dim()

    def parts(self) -> list[Tensor]:
        """Return the witness and the residues."""
        return [self.witness, *self.residues]

    def map(self, function: Callable[[Tensor], Tensor]) -> Dual:
        """Apply a function that only moves elements to each part of the tensor."""
        closures = [
            None if of is None else _map_lazily(of, function) for of in (self.exponential, self.square)
        ]
        terms = None
        if (of := self.terms) is not None:
            terms = Terms(lambda: [term.map(function) for term in of()], of.depth + 1)
        moved = [function(r) for r in self.residues]
        return Dual(function(self.witness), moved, self.dtype, closures[0], closures[1], terms)

    def as_type(self, dtype: torch.dtype) -> Dual:
        """Return the same value with another float dtype."""
        if self.dtype is dtype:
            return self
        return Dual(self.witness, self.residues, dtype, self.exponential, self.square, self.terms)


def _once(compute: Callable[[], Dual] | None) -> Callable[[], Dual] | None:
    """Keep what is computed: a recurrence takes each value several times, and each step those of the last."""
    return None if compute is None else functools.cache(compute)


def _map_lazily(of: Callable[[], Dual], function: Callable[[Tensor], Tensor]) -> Callable[[], Dual]:
    return lambda: of().map(function)
