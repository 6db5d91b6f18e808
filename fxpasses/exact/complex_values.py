"""Complex tensors as two dual numbers, on which operators are written with exact rules of real numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fake.seam.pytree import tree_flatten, tree_map, tree_unflatten
from fxpasses.exact.arithmetic import Arithmetic
from fxpasses.exact.dual import Dual

aten = torch.ops.aten
Call = Callable[..., Any]
"""Evaluates an operator on dual numbers: takes the operator, its arguments and its keyword arguments."""


class Complex:
    """A complex tensor.

    Attributes:
        real: its real part.
        imag: its imaginary part, of the same shape.
    """

    __slots__ = ("imag", "real")

    def __init__(self, real: Dual, imag: Dual) -> None:
        self.real, self.imag = real, imag

    def view_as_real(self) -> Dual:
        """Join both parts along a last dimension of size two, as ``view_as_real`` does."""
        pairs = zip(self.real.residues, self.imag.residues, strict=True)
        witness = torch.stack([self.real.witness, self.imag.witness], -1)
        return Dual(witness, [torch.stack(pair, -1) for pair in pairs], self.real.dtype)

    def tensor(self) -> Tensor:
        """Its witness."""
        return torch.complex(self.real.witness, self.imag.witness)


def from_pairs(pairs: Dual) -> Complex:
    """Split pairs, as ``view_as_complex`` does."""
    return Complex(pairs.map(lambda t: t[..., 0]), pairs.map(lambda t: t[..., 1]))


def is_complex(value: Any) -> bool:
    """Whether a value is a complex tensor."""
    return isinstance(value, Complex) or (isinstance(value, Tensor) and value.is_complex())


def involves_complex(target: Any, flat: Sequence[Any]) -> bool:
    """Whether a call takes or makes complex tensors.

    Args:
        target: the operator.
        flat: its arguments, flattened.
    """
    if target in _CONSTRUCTOR_OVERLOADS or any(map(is_complex, flat)):
        return True
    return target is aten.view.dtype and any(isinstance(v, torch.dtype) and v.is_complex for v in flat)


class ComplexRules:
    """The rules of complex numbers.

    Args:
        arithmetic: of the parts.
        call: evaluates operators on the parts.
    """

    def __init__(self, arithmetic: Arithmetic, call: Call) -> None:
        self._arithmetic, self._call = arithmetic, call

    def evaluate(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Evaluate a call that involves complex numbers.

        Args:
            target: the overload.
            args: tensors as dual numbers or :class:`Complex`, and numbers.
            kwargs: likewise.

        Returns:
            The result, or ``NotImplemented`` if there is no rule.
        """
        packet = target.overloadpacket
        if target is aten.view.dtype:
            return self._view_dtype(*args)
        if packet in _CONSTRUCTORS:
            return getattr(self, _CONSTRUCTORS[packet])(*args)
        if packet in _PARTWISE_OPS:
            return self._apply_to_parts(target, args, dict(kwargs))
        rule = _RULES.get(packet)
        return NotImplemented if rule is None else getattr(self, rule)(target, *args, **kwargs)

    def to_complex(self, value: Any) -> Complex:
        """Convert a tensor or number to a complex tensor."""
        if isinstance(value, Complex):
            return value
        if isinstance(value, Tensor) and value.is_complex():
            value = value.resolve_conj()
            return Complex(self._arithmetic.dual(value.real), self._arithmetic.dual(value.imag))
        if isinstance(value, complex):
            return Complex(self._arithmetic.dual(value.real), self._arithmetic.dual(value.imag))
        real = self._arithmetic.dual(value)
        return Complex(real, self._arithmetic.dual(torch.zeros_like(real.witness), real.dtype))

    def _mul(self, a: Any, b: Any) -> Dual:
        return self._call(aten.mul.Tensor, (a, b), {})  # type: ignore[no-any-return]

    def _add(self, a: Any, b: Any) -> Dual:
        return self._call(aten.add.Tensor, (a, b), {})  # type: ignore[no-any-return]

    def _sub(self, a: Any, b: Any) -> Dual:
        return self._call(aten.sub.Tensor, (a, b), {})  # type: ignore[no-any-return]

    def _unary(self, op: Any, a: Any) -> Dual:
        return self._call(op, (a,), {})  # type: ignore[no-any-return]

    def _from_real_and_imag(self, real: Any, imag: Any) -> Complex:
        return Complex(self._arithmetic.dual(real), self._arithmetic.dual(imag))

    def _from_polar(self, length: Any, angle: Any) -> Complex:
        return Complex(
            self._mul(length, self._unary(aten.cos.default, angle)),
            self._mul(length, self._unary(aten.sin.default, angle)),
        )

    def _from_pairs(self, pairs: Any) -> Complex:
        return from_pairs(self._arithmetic.dual(pairs))

    def _view_dtype(self, value: Any, dtype: torch.dtype) -> Any:
        if dtype.is_complex:
            if is_complex(value):
                return value
            pairs = self._arithmetic.dual(value)
            return from_pairs(pairs.map(lambda t: t.reshape(*t.shape[:-1], -1, 2)))
        return self.to_complex(value).view_as_real().map(lambda t: t.flatten(-2))

    def _apply_to_parts(self, target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if "dtype" in kwargs:
            if kwargs["dtype"] is not None and not kwargs["dtype"].is_complex:
                return NotImplemented
            del kwargs["dtype"]
        packet, args = target.overloadpacket, list(args)
        # Numbers, and tensors that are not complex, have imaginary part zero.
        if packet in (aten.add, aten.sub):
            target, args[:2] = packet.Tensor, map(self.to_complex, args[:2])
        elif packet is aten.where:
            target, args[1:] = packet.self, map(self.to_complex, args[1:])
        elif packet in (aten.cat, aten.stack):
            args[0] = [*map(self.to_complex, args[0])]
        elif packet is aten.constant_pad_nd and args[2:] not in ([], [0], [0.0]):
            return NotImplemented
        flat, spec = tree_flatten((tuple(args), kwargs))
        found = []
        for part in ("real", "imag"):
            values = [getattr(self.to_complex(v), part) if is_complex(v) else v for v in flat]
            given, named = tree_unflatten(values, spec)
            found.append(self._call(target, given, named))
        real, imag = found
        if isinstance(real, Dual):
            return Complex(real, imag)
        return [Complex(a, b) for a, b in zip(real, imag, strict=True)]

    def _parts_as_pairs(self, _: Any, a: Any) -> Dual:
        return self.to_complex(a).view_as_real()

    def _real_part(self, _: Any, a: Any) -> Dual:
        return self.to_complex(a).real

    def _imaginary_part(self, _: Any, a: Any) -> Dual:
        return self.to_complex(a).imag

    def _conjugate(self, _: Any, a: Any) -> Complex:
        a = self.to_complex(a)
        return Complex(a.real, self._unary(aten.neg.default, a.imag))

    def _magnitude(self, _: Any, a: Any) -> Dual:
        return self._unary(aten.sqrt.default, self._squared_magnitude(self.to_complex(a)))

    def _squared_magnitude(self, a: Complex) -> Dual:
        return self._add(self._mul(a.real, a.real), self._mul(a.imag, a.imag))

    def _angle(self, _: Any, a: Any) -> Dual:
        a = self.to_complex(a)
        return self._call(aten.atan2.default, (a.imag, a.real), {})  # type: ignore[no-any-return]

    def _product(self, _: Any, a: Any, b: Any) -> Complex:
        a, b = self.to_complex(a), self.to_complex(b)
        return Complex(
            self._sub(self._mul(a.real, b.real), self._mul(a.imag, b.imag)),
            self._add(self._mul(a.real, b.imag), self._mul(a.imag, b.real)),
        )

    def _matrix_product(self, target: Any, a: Any, b: Any) -> Complex:
        a, b = self.to_complex(a), self.to_complex(b)

        def product(left: Dual, right: Dual) -> Any:
            return self._call(target, (left, right), {})

        return Complex(
            self._sub(product(a.real, b.real), product(a.imag, b.imag)),
            self._add(product(a.real, b.imag), product(a.imag, b.real)),
        )

    def _quotient(self, target: Any, a: Any, b: Any) -> Complex:
        a, divisor = self.to_complex(a), self.to_complex(b)
        if not is_complex(b) and not isinstance(b, complex):
            return Complex(*(self._call(aten.div.Tensor, (v, divisor.real), {}) for v in (a.real, a.imag)))
        numerator, denominator = (
            self._product(target, a, self._conjugate(target, divisor)),
            self._squared_magnitude(divisor),
        )
        return Complex(
            *(self._call(aten.div.Tensor, (v, denominator), {}) for v in (numerator.real, numerator.imag))
        )

    def _exponential(self, _: Any, a: Any) -> Complex:
        a = self.to_complex(a)
        return self._from_polar(self._unary(aten.exp.default, a.real), a.imag)


def complex_to_tensors(value: Any) -> Any:
    """Replace each ``Complex`` in a value by a tensor of its witnesses."""
    return tree_map(lambda v: v.tensor() if isinstance(v, Complex) else v, value)


_CONSTRUCTORS = {
    aten.complex: "_from_real_and_imag",
    aten.polar: "_from_polar",
    aten.view_as_complex: "_from_pairs",
}
_CONSTRUCTOR_OVERLOADS = {packet.default for packet in _CONSTRUCTORS}
_RULES = {
    aten.view_as_real: "_parts_as_pairs",
    aten.real: "_real_part",
    aten.imag: "_imaginary_part",
    aten.conj: "_conjugate",
    aten._conj: "_conjugate",
    aten._conj_physical: "_conjugate",
    aten.conj_physical: "_conjugate",
    aten.abs: "_magnitude",
    aten.angle: "_angle",
    aten.mul: "_product",
    aten.div: "_quotient",
    aten.exp: "_exponential",
    **dict.fromkeys((aten.mm, aten.bmm, aten.mv, aten.matmul, aten.dot, aten.outer), "_matrix_product"),
}
_PARTWISE_OPS = {
    *(aten.add, aten.sub, aten.neg, aten.sum, aten.mean, aten.cumsum, aten.clone, aten.detach, aten.alias),
    *(aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias, aten.permute, aten.transpose, aten.t),
    *(aten.unsqueeze, aten.squeeze, aten.expand, aten.slice, aten.select, aten.cat, aten.stack, aten.flip),
    *(aten.roll, aten.index, aten.index_select, aten.split, aten.split_with_sizes, aten.unbind, aten.repeat),
    *(aten.where, aten.resolve_conj, aten.contiguous, aten.constant_pad_nd),
    *(aten._to_copy, aten.lift_fresh_copy),
}
"""Operators that act on each part of a complex tensor separately."""
