"""Arithmetic of dual numbers, exact on their residues.

Nothing rounds: a cast between float dtypes changes the dtype that a value has in the graph, not the value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpasses.exact.dual import Dual
from fxpasses.exact.fields import LEVELS, Field
from fxpasses.exact.float_constants import residues_of_number, uniform_value, unrounded
from fxpasses.exact.folded_numbers import Product, residues_of_sum
from fxpasses.exact.products import exponential_of_product, product_over
from fxpasses.exact.sums import map_terms, terms_of_product, terms_of_sum

_TOLERANCE = 1e-9
"""A sum this much smaller than its terms may be zero, and numbers this close equal: the residues decide."""
_MAX_DENOMINATOR = 2**20
_MAX_EXPONENTS = 64
"""The most distinct integers in a tensor of exponents."""


Operand = Dual | Tensor | float | int


class Arithmetic:
    """Operations on dual numbers in one field.

    Args:
        field: the field of the residues.

    Attributes:
        folded: what numbers were computed from.
        squares_roots: whether sines of sums are computed from their terms, and squaring a root gives its
            radicand. A residue of a root is that of it or of its negative. If false, a root is an unknown
            variable, and all laws of products hold. If true, some squares are exact and other laws hold, but
            not all of these.
    """

    def __init__(self, field: Field) -> None:
        self.field = field
        self.primes = field.primes
        self.folded: dict[float, tuple[Product, ...]] = {}
        self.squares_roots = False

    # Making duals

    def dual(self, value: Operand, dtype: torch.dtype | None = None) -> Dual:
        """Convert a tensor or number to a dual number."""
        if isinstance(value, Dual):
            return value
        if isinstance(value, Tensor):
            kind = value.dtype if value.is_floating_point() else torch.float32
            return Dual(value.double(), self.field.encode(value), dtype or kind)
        value = unrounded(value) if isinstance(value, float) else value
        if products := self.folded.get(value):  # type: ignore[arg-type]
            residues = residues_of_sum(self.field, products)
        else:
            residues = residues_of_number(self.field, type(value), value)  # type: ignore[arg-type]
        return Dual(
            torch.tensor(float(value), dtype=torch.float64), [torch.tensor(r) for r in residues], dtype
        )

    def dual_of_intended(self, value: Tensor) -> Dual:
        """Read a float tensor as the numbers that its elements are meant to be: ``0.1`` is a tenth."""
        witness = value.double()
        residues = torch.stack(self.field.encode(witness), -1)
        # A number that float32 represents, as most elements of a model's inputs, means itself. Others are
        # read one by one.
        inexact = (witness != witness.float().double()) & witness.isfinite()
        distinct, at = witness[inexact].unique(return_inverse=True)
        rows = [residues_of_number(self.field, float, number) for number in distinct.tolist()]
        residues[inexact] = torch.tensor(rows, dtype=torch.int64).view(-1, LEVELS)[at]
        return Dual(witness, list(residues.unbind(-1)), value.dtype)

    def constant(self, value: Tensor) -> Dual:
        """Convert a float tensor that a graph holds. If all elements are one number, read that number."""
        number = uniform_value(value)
        return self.dual(value) if number is None else self.full(value.shape, number, value.dtype)

    def full(self, size: Sequence[int], value: Operand, dtype: torch.dtype) -> Dual:
        """Make a tensor with the same value everywhere.

        Args:
            size: its shape.
            value: a number, or a dual number that can be expanded to ``size``.
            dtype: of the tensor that it stands for.
        """
        number = self.dual(value)
        return Dual(
            number.witness.expand(size).clone(), [r.expand(size).clone() for r in number.residues], dtype
        )

    def assemble(
        self, witness: Tensor, residues: Sequence[Tensor], *operands: Dual, dtype: torch.dtype | None = None
    ) -> Dual:
        """Apply the rules for non-finite values to the residues of a result.

        Non-finite elements have residue 0. Finite ones made of such (``exp(-inf)``, ``1 / inf``) are what the
        witness says.

        Args:
            witness: of the result.
            residues: of the result, as field arithmetic gave them.
            operands: what it was made of, broadcast against each other elementwise.
            dtype: of the result; the promoted dtype of the operands by default.
        """
        masked = list(residues)
        finite = torch.isfinite(witness)
        if not finite.all():
            masked = [torch.where(finite, r, 0) for r in masked]
        touched = torch.zeros((), dtype=torch.bool)
        for operand in operands:
            bad = ~torch.isfinite(operand.witness)
            if bad.any():
                touched = touched | bad
        touched = touched & finite
        if touched.any():
            encoded = self.field.encode(torch.where(touched, witness, 0.0))
            masked = [torch.where(touched, e, r) for e, r in zip(encoded, masked, strict=True)]
        return Dual(witness, masked, dtype or promoted_dtype(*operands))

    # Field operations

    def add(self, a: Operand, b: Operand, alpha: Operand = 1) -> Dual:
        """Compute ``a + alpha * b``.

        Args:
            a: an operand, broadcast as usual.
            b: an operand.
            alpha: a factor of ``b``.

        Returns:
            The sum. If floats cancel and all residues are zero, its witness is exactly zero.
        """
        a, b = self.dual(a), self.dual(b)
        if not isinstance(alpha, (int, float)) or alpha != 1:
            b = self.mul(b, alpha)
        witness = a.witness + b.witness
        residues = [(x + y) % p for x, y, p in zip(a.residues, b.residues, self.primes, strict=True)]
        cancelled = (witness != 0) & (witness.abs() < _TOLERANCE * (a.witness.abs() + b.witness.abs()))
        if cancelled.any():
            for r in residues:
                cancelled = cancelled & (r == 0)
            witness = torch.where(cancelled, 0.0, witness)
        result = self.assemble(witness, residues, a, b)
        if a.exponential is not None or b.exponential is not None:
            result.exponential = lambda: self.mul(self.exp(a), self.exp(b))
        result.terms = terms_of_sum(a, b, result.shape) if self.squares_roots else None
        return result

    def neg(self, a: Operand) -> Dual:
        """``-a``."""
        a = self.dual(a)
        negative = [(-r) % p for r, p in zip(a.residues, self.primes, strict=True)]
        inverse = None if a.exponential is None else lambda: self.reciprocal(self.exp(a))
        return Dual(-a.witness, negative, a.dtype, inverse, a.square, map_terms(a, self.neg))

    def sub(self, a: Operand, b: Operand, alpha: Operand = 1) -> Dual:
        """Compute ``a - alpha * b``. Args: those of :meth:`add`."""
        return self.add(a, self.neg(b), alpha)

    def mul(self, a: Operand, b: Operand) -> Dual:
        """``a * b``."""
        a, b = self.dual(a), self.dual(b)
        witness = a.witness * b.witness
        if a.square is not None and b.square is not None and _is_identical(a, b):
            return self.assemble(witness, a.square().residues, a, b)
        residues = [x * y % p for x, y, p in zip(a.residues, b.residues, self.primes, strict=True)]
        result = self.assemble(witness, residues, a, b)
        if a.square is not None or b.square is not None:
            result.square = lambda: self.mul(self.squared(a), self.squared(b))
        result.exponential = exponential_of_product(self, a, b)
        result.terms = terms_of_product(self.mul, a, b) if self.squares_roots else None
        return result

    def squared(self, a: Dual) -> Dual:
        """Compute ``a * a``, also if ``a`` is made of a root, whose residues do not determine a sign."""
        return self.mul(a, a) if a.square is None else a.square()

    def reciprocal(self, a: Operand) -> Dual:
        """``1 / a``."""
        a = self.dual(a)
        residues = [self.field.inverse(k, r) for k, r in enumerate(a.residues)]
        result = self.assemble(1 / a.witness, residues, a)
        if a.square is not None:
            result.square = lambda: self.reciprocal(self.squared(a))
        return result

    def div(self, a: Operand, b: Operand) -> Dual:
        """``a / b``."""
        a, b = self.dual(a), self.dual(b)
        residues = [
            x * self.field.inverse(k, y) % self.primes[k]
            for k, (x, y) in enumerate(zip(a.residues, b.residues, strict=True))
        ]
        result = self.assemble(a.witness / b.witness, residues, a, b)
        if a.square is not None or b.square is not None:
            result.square = lambda: self.div(self.squared(a), self.squared(b))
        result.terms = map_terms(a, lambda term: self.div(term, b))
        return result

    def integer_power(self, a: Operand, exponent: int) -> Dual:
        """``a ** exponent``."""
        a = self.dual(a)
        if a.square is not None and exponent % 2 == 0:
            powered = self.integer_power(a.square(), exponent // 2)
            return self.assemble(a.witness**exponent, powered.residues, a)
        residues = [self.field.power(k, r, exponent) for k, r in enumerate(a.residues)]
        if exponent == 0:
            residues = [torch.ones_like(r) for r in residues]
        result = self.assemble(a.witness**exponent, residues, a)
        if (square := a.square) is not None:
            result.square = lambda: self.integer_power(square(), exponent)
        return result

    def sqrt(self, a: Operand) -> Dual:
        """Compute ``sqrt(a)``.

        Its square is ``a`` up to the sign, which the witness knows, or ``a`` if ``squares_roots``.
        """
        a = self.dual(a)
        result = self.assemble(a.witness.sqrt(), [self.field.sqrt(k, r) for k, r in enumerate(a.residues)], a)
        result.square = (lambda: a) if self.squares_roots else None
        return result

    def pow(self, base: Operand, exponent: Operand) -> Dual:
        """``base ** exponent``: exact for integers and halves, else ``exp(exponent * log(base))``."""
        if isinstance(exponent, (Dual, Tensor)):
            distinct = self.dual(exponent).witness.unique()
            if 0 < len(distinct) <= _MAX_EXPONENTS and bool(
                (distinct == distinct.round()).all() & (distinct.abs() < 2**31).all()
            ):
                return self._integer_powers(self.dual(base), self.dual(exponent), distinct.tolist())
            logarithm: Operand = (
                self.log(base) if isinstance(base, (Dual, Tensor)) else self.log(self.dual(float(base)))
            )
            powered = self.exp(self.mul(exponent, logarithm))
            a, e = self.dual(base), self.dual(exponent)
            return self.assemble(torch.pow(a.witness, e.witness), powered.residues, a, e, dtype=powered.dtype)
        a = self.dual(base)
        if float(exponent).is_integer() and abs(exponent) < 2**31:
            return self.integer_power(a, int(exponent))
        if float(2 * exponent).is_integer() and abs(exponent) < 2**31:
            powered = self.integer_power(self.sqrt(a), int(2 * exponent))
        else:
            powered = self.exp(self.mul(self.log(a), exponent))
        result = self.assemble(a.witness**exponent, powered.residues, a)
        result.square = powered.square
        return result

    def _integer_powers(self, a: Dual, exponents: Dual, distinct: list[float]) -> Dual:
        """``a ** exponents`` for few distinct integer exponents, such as powers of a decay."""
        witness = torch.pow(a.witness, exponents.witness)
        residues = [torch.zeros(witness.shape, dtype=r.dtype) for r in a.residues]
        for number in distinct:
            powered = self.integer_power(a, int(number)).residues
            here = exponents.witness == number
            residues = [torch.where(here, p, r) for p, r in zip(powered, residues, strict=True)]
        return self.assemble(witness, residues, a, exponents)

    def exp(self, a: Operand) -> Dual:
        """Compute ``exp(a)``; exactly zero where float64 underflows: ``exp(-1e30)`` equals ``exp(-inf)``."""
        a = self.dual(a)
        witness = a.witness.exp()
        if a.exponential is not None:
            residues = a.exponential().residues
        else:
            residues = [self.field.exp(k, a.residues[k + 1]) for k in range(LEVELS - 1)]
            last = a.residues[-1]
            residues.append(torch.where(last == 0, 1, self.field.hash(LEVELS - 1, "exp", last)))
        return self.assemble(witness, [torch.where(witness == 0, 0, r) for r in residues], a)

    def log(self, a: Operand) -> Dual:
        """``log(a)``."""
        a = self.dual(a)
        first = a.residues[0]
        residues = [torch.where(first == 1, 0, self.field.hash(0, "log", first))]
        residues += [self.field.log(k, a.residues[k]) for k in range(LEVELS - 1)]
        result = self.assemble(a.witness.log(), residues, a)
        result.exponential = lambda: a
        return result

    def uninterpreted(self, name: str, a: Operand, witness: Tensor, parity: int = 0) -> Dual:
        """Apply a function of which nothing else is known.

        Args:
            name: of the function.
            a: its argument.
            witness: its value.
            parity: 1 for even functions, -1 for odd ones, which relates ``f(-x)`` to ``f(x)``.
        """
        a = self.dual(a)
        residues = []
        for k, (r, p) in enumerate(zip(a.residues, self.primes, strict=True)):
            negative = (-r) % p
            least = torch.minimum(r, negative) if parity else r
            hashed = self.field.hash(k, name, least)
            if parity < 0:
                hashed = torch.where(r == 0, 0, torch.where(least == r, hashed, (-hashed) % p))
            residues.append(hashed)
        return self.assemble(witness, residues, a)

    def with_witness(self, value: Dual, witness: Tensor, *operands: Dual) -> Dual:
        """Combine the residues of ``value`` with a more accurate witness."""
        result = self.assemble(witness, value.residues, *operands, dtype=value.dtype)
        result.exponential, result.square = value.exponential, value.square
        return result

    # Choices by the witness

    def comparable_witnesses(self, a: Operand, b: Operand) -> tuple[Tensor, Tensor]:
        """The witnesses of two operands, made equal where float64 parts them and the residues do not."""
        a, b = self.dual(a), self.dual(b)
        near = (a.witness != b.witness) & ((a.witness - b.witness).abs() < _TOLERANCE * a.witness.abs())
        for x, y in zip(a.residues, b.residues, strict=True) if bool(near.any()) else ():
            near = near & (x == y)
        return torch.where(near, b.witness, a.witness), b.witness

    def snap_to_integers(self, a: Operand) -> Tensor:
        """Return the witness, made an integer where float64 rounding alone misses one."""
        a = self.dual(a)
        return self.comparable_witnesses(a, self.from_witness(a.witness.round(), a))[0]

    def from_witness(self, witness: Tensor, like: Operand) -> Dual:
        """Encode a result that the witness alone determines, such as that of ``floor``."""
        return self.assemble(witness, self.field.encode(witness), self.dual(like))

    def select(self, condition: Tensor, a: Operand, b: Operand, witness: Tensor | None = None) -> Dual:
        """Compute ``where(condition, a, b)``.

        Args:
            condition: a bool tensor.
            a: where it is true.
            b: where it is false.
            witness: of the result, if ``where`` would lose a NaN.
        """
        a, b = self.dual(a), self.dual(b)
        if witness is None:
            witness = torch.where(condition, a.witness, b.witness)
        finite = torch.isfinite(witness)
        residues = [
            torch.where(finite, torch.where(condition, x, y), 0)
            for x, y in zip(a.residues, b.residues, strict=True)
        ]
        result = Dual(witness, residues, promoted_dtype(a, b))
        if a.exponential is not None or b.exponential is not None:
            result.exponential = lambda: self.select(condition, self.exp(a), self.exp(b))
        if a.square is not None or b.square is not None:
            result.square = lambda: self.select(condition, self.squared(a), self.squared(b))
        return result

    # Sums and products of elements

    def linear(self, function: Callable[..., Tensor], *values: Dual) -> Dual:
        """Apply a function that adds up elements, to duals of one dtype."""
        witness = function(*(v.witness for v in values))
        residues = [function(*(v.residues[k] for v in values)) % p for k, p in enumerate(self.primes)]
        finite = torch.isfinite(witness)
        return Dual(witness, [torch.where(finite, r, 0) for r in residues], values[0].dtype)

    def rational(self, function: Callable[[Tensor], Tensor], a: Dual, denominator: int) -> Any:
        """Apply a linear function of float64 tensors with fractional coefficients, such as a windowed mean.

        Args:
            function: is linear.
            a: its argument.
            denominator: a common one of the coefficients.

        Returns:
            The result; ``NotImplemented`` if float64 cannot represent what the residues add up to.
        """
        if denominator > _MAX_DENOMINATOR:
            return NotImplemented
        residues = []
        for k, (r, p) in enumerate(zip(a.residues, self.primes, strict=True)):
            scaled = (function(r.double()) * denominator).round().long() % p
            residues.append(scaled * self.field.inverse(k, torch.tensor(denominator % p)) % p)
        return self.assemble(function(a.witness), residues, dtype=a.dtype)

    def sum(self, a: Dual, dim: Sequence[int] | None = None, keepdim: bool = False) -> Dual:
        """Sum over dimensions.

        Args:
            a: a tensor.
            dim: the dimensions; all by default, or if none is listed.
            keepdim: whether they are kept, with size 1.
        """
        if not dim and a.dim() == 0:
            return a
        over = list(range(a.dim())) if dim is None or not len(dim) else list(dim)
        result = self.linear(lambda t: t.sum(over, keepdim), a)
        if a.exponential is not None:
            result.exponential = lambda: product_over(self, self.exp(a), over, keepdim)
        return result

    def mean(self, a: Dual, dim: Sequence[int] | None = None, keepdim: bool = False) -> Dual:
        """Average over dimensions. Args: those of :meth:`sum`."""
        over = list(range(a.dim())) if dim is None or not len(dim) else list(dim)
        if not over:
            return a
        return self.div(self.sum(a, over, keepdim), math.prod(a.shape[d] for d in over))

    def variance(
        self, a: Dual, dim: Sequence[int] | None = None, correction: Any = 1, keepdim: bool = False
    ) -> tuple[Dual, Dual]:
        """Compute variance and mean over dimensions.

        Args:
            a: the values.
            dim: the dimensions; all by default.
            correction: what is subtracted from the number of values.
            keepdim: whether the dimensions are kept, with size 1.
        """
        over = list(range(a.dim())) if dim is None or not len(dim) else list(dim)
        count = math.prod(a.shape[d] for d in over)
        mean = self.mean(a, over, True)
        centred = self.sub(a, mean)
        squares = self.sum(self.mul(centred, centred), over, keepdim)
        divisor = count - (1 if correction is None else correction)
        variance = self.div(squares, max(divisor, 0))
        return variance, mean if keepdim or not over else self.sum(mean, over, False)

    def bilinear(self, function: Callable[[Tensor, Tensor], Tensor], a: Dual, b: Dual) -> Dual:
        """Apply a function that is linear in both arguments, such as a matmul or a convolution.

        Args:
            function: takes two float64 tensors.
            a: the left argument.
            b: the right argument.
        """
        residues = [
            self.field.bilinear(k, function, x, y)
            for k, (x, y) in enumerate(zip(a.residues, b.residues, strict=True))
        ]
        return self.assemble(function(a.witness, b.witness), residues, dtype=promoted_dtype(a, b))

    def cumprod(self, a: Dual, dim: int) -> Dual:
        """Compute the cumulative products along a dimension."""
        slices = [a.map(lambda t, i=i: t.select(dim, i)) for i in range(a.shape[dim])]  # type: ignore[misc]
        if not slices:
            return a
        found = [slices[0]]
        for element in slices[1:]:
            found.append(self.mul(found[-1], element))
        return stack(found, dim)

    # Elements chosen by the witness

    def extreme(self, a: Dual, dim: Sequence[int], keepdim: bool, largest: bool) -> Dual:
        """Take the largest or smallest element over dimensions, as the witness orders them.

        Args:
            a: a tensor.
            dim: the dimensions; all if none is listed.
            keepdim: whether they are kept, with size 1.
            largest: whether to take the maximum.
        """
        over = sorted({d % a.dim() for d in dim} or range(a.dim())) if a.dim() else []
        if not over:
            return a
        rest = [d for d in range(a.dim()) if d not in over]
        outer = [a.shape[d] for d in rest]

        def flat(t: Tensor) -> Tensor:
            return t.permute(rest + over).reshape([*outer, math.prod(a.shape[d] for d in over)])

        witness = flat(a.witness)
        index = witness.argmax(-1, True) if largest else witness.argmin(-1, True)
        size = [1 if d in over else n for d, n in enumerate(a.shape)] if keepdim else outer
        chosen = a.map(lambda t: flat(t).gather(-1, index).reshape(size))
        return self.with_witness(chosen, chosen.witness)


def promoted_dtype(*operands: Dual) -> torch.dtype:
    """Return the dtype that PyTorch promotes these operands to: those with dimensions take precedence."""
    kinds = [o.dtype for o in operands if o.dtype is not None and o.dim()]
    kinds = kinds or [o.dtype for o in operands if o.dtype is not None]
    result = kinds[0] if kinds else torch.float32
    for kind in kinds[1:]:
        result = torch.promote_types(result, kind)
    return result


def stack(values: Sequence[Dual], dim: int) -> Dual:
    """Stack duals of one shape along a new dimension."""
    witness = torch.stack([v.witness for v in values], dim)
    residues = [torch.stack([v.residues[k] for v in values], dim) for k in range(LEVELS)]
    return Dual(witness, residues, values[0].dtype)


def _is_identical(a: Dual, b: Dual) -> bool:
    return a is b or (torch.equal(a.witness, b.witness) and all(map(torch.equal, a.residues, b.residues)))
