"""Dual numbers: a float tensor as float64 witness and residues.

The witness decides what a real number decides: comparisons, orders, indices, branches, whether a value is NaN or infinite. The
residues decide whether two values are the same function of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Dual:
    """A float tensor.

    Attributes:
        witness: float64, of the shape that the tensor has.
        residues: one int64 tensor a level, of the same shape; 0 where the witness is not finite.
        dtype: the type that the tensor has in the graph; ``None`` for a Python number.
        exponential: computes ``exp`` of it where it was made of a logarithm, whose residues do not know a sign.
        square: computes the square of it where it was made of a root, likewise.
    """

    __slots__ = ("dtype", "exponential", "residues", "square", "witness")

    def __init__(
        self,
        witness: Tensor,
        residues: Sequence[Tensor],
        dtype: torch.dtype | None = torch.float32,
        exponential: Callable[[], Dual] | None = None,
        square: Callable[[], Dual] | None = None,
    ) -> None:
        self.witness = witness
        self.residues = list(residues)
        self.dtype = dtype
        self.exponential, self.square = exponential, square

    @property
    def shape(self) -> torch.Size:
        """The sizes of the tensor."""
        return self.witness.shape

    def dim(self) -> int:
        """The number of dimensions."""
        return self.witness.dim()

    def parts(self) -> list[Tensor]:
        """The witness and the residues."""
        return [self.witness, *self.residues]

    def map(self, function: Callable[[Tensor], Tensor]) -> Dual:
        """The tensor with a function that only moves elements applied to each part."""
        known = (None if of is None else _moved(of, function) for of in (self.exponential, self.square))
        return Dual(function(self.witness), [function(r) for r in self.residues], self.dtype, *known)

    def as_type(self, dtype: torch.dtype) -> Dual:
        """The same value in another float type."""
        if self.dtype is dtype:
            return self
        return Dual(self.witness, self.residues, dtype, self.exponential, self.square)


def _moved(of: Callable[[], Dual], function: Callable[[Tensor], Tensor]) -> Callable[[], Dual]:
    return lambda: of().map(function)
