"""Compare two values: finite ones by residues, non-finite ones by class, integers by element."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fxpasses.exact.complex_values import Complex, complex_to_tensors
from fxpasses.exact.dual import Dual
from fxpasses.exact.fields import Field
from fxpasses.graphs.numbers import became

Relation = Literal["equal", "unproved", "where not finite", "different"]
RANKS: tuple[Relation, ...] = ("equal", "unproved", "where not finite", "different")
"""From best to worst.

``unproved``: the residues differ and the witnesses do not. ``where not finite``: the values differ only where
the first is infinite or NaN.
"""

DRIFT = 1e-10
"""Witnesses this close, relative to the largest of their tensor, may differ by float64 rounding alone."""
KERNEL_DRIFT = 1e-3
"""The same if a kernel of unknown accuracy computed a witness."""
_EQUAL_RESIDUES_DRIFT = 1e-5
"""If witnesses of equal residues differ by more, a rule equates too much: ``log(x)`` and ``log(-x)``."""
_SIGN_TOLERANCE = 1e-9
SIGN_REASON = "equal but for a sign"
"""The reason if residues are equal and witnesses are not."""
MASK = 1e30
"""Values at least this large stand for minus infinity in a mask."""


@dataclass(frozen=True)
class Comparison:
    """How two values are related.

    Attributes:
        relation: see :data:`RANKS`.
        element: the index of an element that shows it.
        first: its value in the first tensor.
        second: its value in the second tensor.
        reason: in words, if numbers do not tell it.
        distance: between the two, relative to the largest of their tensor; infinite if they are not finite
            floats.
    """

    relation: Relation
    element: tuple[int, ...] = ()
    first: float | int | None = None
    second: float | int | None = None
    reason: str = ""
    distance: float = math.inf

    @property
    def rank(self) -> tuple[int, float]:
        """A key for sorting; larger is worse."""
        return RANKS.index(self.relation), self.distance

    def __str__(self) -> str:
        if self.first is None or self.second is None:
            return self.reason or self.relation
        where = f"element {list(self.element)}: " if self.element else ""
        suffix = f" ({self.reason})" if self.reason else ""
        return f"{where}{became(self.first, self.second)}{suffix}"


EQUAL = Comparison("equal", distance=0.0)


def compare(
    a: Any, b: Any, field: Field, scale: float = 0.0, signed_zeros: bool = False, drift: float = DRIFT
) -> Comparison:
    """Compare two results of a graph, nested ones leaf by leaf.

    Args:
        a: the first.
        b: the second.
        field: of their residues.
        scale: the size of values in the graph: a difference far below it may be float64 rounding.
        signed_zeros: whether 0.0 and -0.0 are different values.
        drift: how far apart witnesses of one value may be.
    """
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return Comparison("different", reason=f"{len(a)} values became {len(b)}")
        found = [compare(x, y, field, scale, signed_zeros, drift) for x, y in zip(a, b, strict=True)]
        return max(found, key=lambda c: c.rank, default=EQUAL)
    if isinstance(a, Complex) and isinstance(b, Complex):
        a, b = a.view_as_real(), b.view_as_real()
    a, b = complex_to_tensors(a), complex_to_tensors(b)
    if isinstance(a, Dual) and isinstance(b, Dual):
        return _compare_duals(a, b, field, scale, signed_zeros, drift)
    if isinstance(a, (Dual, Tensor)) or isinstance(b, (Dual, Tensor)):
        return _compare_integers(a, b)
    return EQUAL if a == b else Comparison("different", reason=f"{a} became {b}")


def _compare_integers(a: Any, b: Any) -> Comparison:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return Comparison("different", reason=f"{_describe(a)} became {_describe(b)}")
    if a.shape != b.shape or a.dtype != b.dtype:
        return Comparison("different", reason=f"{a.dtype}{list(a.shape)} became {b.dtype}{list(b.shape)}")
    wrong = a != b
    if not wrong.any():
        return EQUAL
    if a.is_complex():
        return _compare_complex(a, b)
    at = _unravel_index(wrong.flatten().long().argmax(), a)
    return Comparison("different", at, a[at].item(), b[at].item())


def _compare_complex(a: Tensor, b: Tensor) -> Comparison:
    """Complex numbers are only floats computed by kernels."""
    x, y = (torch.view_as_real(value.resolve_conj()).double() for value in (a, b))
    far = (x - y).abs().nan_to_num(math.inf)
    at = _unravel_index(far.argmax(), x)
    distance = float(far[at]) / max(float(x.abs().nan_to_num(0.0, 0.0, 0.0).max()), 1e-300)
    relation: Relation = "different" if distance > KERNEL_DRIFT else "unproved"
    return Comparison(relation, at, x[at].item(), y[at].item(), "a part of a complex number", distance)


def _describe(value: Any) -> str:
    if isinstance(value, Dual):
        return f"a float tensor of shape {list(value.shape)}"
    if isinstance(value, Tensor):
        return f"an integer tensor of shape {list(value.shape)}"
    return repr(value)


def _compare_duals(
    a: Dual, b: Dual, field: Field, scale: float, signed_zeros: bool, drift: float
) -> Comparison:
    if a is b:
        return EQUAL
    if a.shape != b.shape:
        return Comparison("different", reason=f"shape {list(a.shape)} became {list(b.shape)}")
    if a.dtype is not None and b.dtype is not None and a.dtype != b.dtype:
        return Comparison("different", reason=f"{a.dtype} became {b.dtype}")
    if a.witness.numel() == 0:
        return EQUAL
    x, y = a.witness, b.witness
    other_class = _non_finite_class(x) != _non_finite_class(y)
    if other_class.any():
        only_there = not torch.isfinite(x[other_class]).any()
        at = _unravel_index(other_class.flatten().long().argmax(), x)
        return Comparison("where not finite" if only_there else "different", at, x[at].item(), y[at].item())
    if signed_zeros:
        other_sign = (torch.signbit(x) != torch.signbit(y)) & (x == 0) & (y == 0)
        if other_sign.any():
            at = _unravel_index(other_sign.flatten().long().argmax(), x)
            return Comparison("different", at, x[at].item(), y[at].item(), "the sign of a zero")
    finite = torch.isfinite(x)
    distance = torch.where(finite, (x - y).abs(), 0.0)
    size = torch.where(finite, torch.maximum(x.abs(), y.abs()), 0.0)
    is_mask = (size >= MASK) & (x == y)  # next to a mask everything else would be negligible
    own_scale = max(float(size.masked_fill(is_mask, 0.0).max()), 1e-300)
    at = _unravel_index(distance.argmax(), x)
    largest = max(own_scale, scale)
    if any(bool((r == s).all()) for r, s in zip(a.residues, b.residues, strict=True)):
        if float(distance[at]) <= _EQUAL_RESIDUES_DRIFT * largest:
            return EQUAL
        relative = float(distance[at]) / own_scale
        return Comparison("different", at, x[at].item(), y[at].item(), SIGN_REASON, relative)
    if _equal_up_to_sign(a, b, field):
        return EQUAL
    relation: Relation = "different" if float(distance[at]) > drift * largest else "unproved"
    return Comparison(relation, at, x[at].item(), y[at].item(), distance=float(distance[at]) / own_scale)


def _equal_up_to_sign(a: Dual, b: Dual, field: Field) -> bool:
    """``root(x) ** 2`` and ``exp(log(x))`` leave the sign of residues open; the witness knows it."""
    if not torch.allclose(a.witness, b.witness, _SIGN_TOLERANCE, 0.0, equal_nan=True):
        return False
    return any(
        bool(((r == s) | (r == (-s) % p)).all())
        for r, s, p in zip(a.residues, b.residues, field.primes, strict=True)
    )


def _non_finite_class(witness: Tensor) -> Tensor:
    """0 for finite elements, else the kind of non-finite value."""
    return torch.nan_to_num(witness, nan=9.0, posinf=1.0, neginf=-1.0) * ~torch.isfinite(witness)


def _unravel_index(flat: Tensor, of: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(flat, of.shape))


def digests(value: Dual) -> list[tuple[Any, ...]]:
    """Return keys that equal values share, one per level."""
    found = []
    for level, residues in enumerate(value.residues):
        data = hashlib.blake2b(residues.contiguous().numpy().tobytes(), digest_size=16).digest()
        found.append((level, value.shape, value.dtype, data))
    return found
