"""Pointwise operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxpasses.exact.angles import cosine_and_sine
from fxpasses.exact.arithmetic import Arithmetic
from fxpasses.exact.dual import Dual
from fxpasses.exact.rules.table import named, register_rules, rule

aten = torch.ops.aten


@rule(aten.div)
def _div(m: Arithmetic, op: Any, a: Any, b: Any, rounding_mode: str | None = None) -> Dual:
    if rounding_mode is None:
        return m.div(a, b)
    quotient = m.div(a, b)
    whole = m.snap_to_integers(quotient)
    return m.from_witness(whole.floor() if rounding_mode == "floor" else whole.trunc(), quotient)


def _with_accurate_witness(
    witness: Callable[[Tensor], Tensor], formula: Callable[[Arithmetic, Dual], Dual]
) -> Callable[..., Dual]:
    """Make a rule from a formula of one operand, with a more accurate witness computed by PyTorch."""

    def _rule(m: Arithmetic, op: Any, a: Dual) -> Dual:
        a = m.dual(a)
        return m.with_witness(formula(m, a), witness(a.witness), a)

    return _rule


register_rules(
    {
        aten.add: lambda m, op, a, b, alpha=1: m.add(a, b, alpha),
        aten.sub: lambda m, op, a, b, alpha=1: m.sub(a, b, alpha),
        aten.rsub: lambda m, op, a, b, alpha=1: m.sub(b, a, alpha),
        aten.mul: lambda m, op, a, b: m.mul(a, b),
        aten.floor_divide: lambda m, op, a, b: _div(m, op, a, b, "floor"),
        aten.remainder: lambda m, op, a, b: m.sub(a, m.mul(b, _div(m, op, a, b, "floor"))),
        aten.fmod: lambda m, op, a, b: m.sub(a, m.mul(b, _div(m, op, a, b, "trunc"))),
        aten.neg: lambda m, op, a: m.neg(a),
        aten.reciprocal: lambda m, op, a: m.reciprocal(a),
        aten.sqrt: lambda m, op, a: m.sqrt(a),
        aten.rsqrt: lambda m, op, a: m.reciprocal(m.sqrt(a)),
        aten.square: lambda m, op, a: m.mul(a, a),
        aten.pow: lambda m, op, a, exponent: m.pow(a, exponent),
        aten.exp: lambda m, op, a: m.exp(a),
        aten.exp2: _with_accurate_witness(torch.exp2, lambda m, a: m.exp(m.mul(a, math.log(2)))),
        aten.expm1: _with_accurate_witness(torch.expm1, lambda m, a: m.sub(m.exp(a), 1)),
        aten.log: lambda m, op, a: m.log(a),
        aten.log2: _with_accurate_witness(torch.log2, lambda m, a: m.mul(m.log(a), 1 / math.log(2))),
        aten.log10: _with_accurate_witness(torch.log10, lambda m, a: m.mul(m.log(a), 1 / math.log(10))),
        aten.log1p: _with_accurate_witness(torch.log1p, lambda m, a: m.log(m.add(a, 1))),
        aten.sinh: _with_accurate_witness(
            torch.sinh, lambda m, a: m.div(m.sub(m.exp(a), m.exp(m.neg(a))), 2)
        ),
        aten.cosh: _with_accurate_witness(
            torch.cosh, lambda m, a: m.div(m.add(m.exp(a), m.exp(m.neg(a))), 2)
        ),
        aten.sigmoid: _with_accurate_witness(
            torch.sigmoid, lambda m, a: m.reciprocal(m.add(m.exp(m.neg(a)), 1))
        ),
        aten.erfc: _with_accurate_witness(torch.erfc, lambda m, a: m.sub(1, _erf(m, None, a))),
        aten.tan: _with_accurate_witness(torch.tan, lambda m, a: m.div(_sin(m, None, a), _cos(m, None, a))),
    }
)


@rule(aten.hypot)
def _hypot(m: Arithmetic, op: Any, a: Any, b: Any) -> Dual:
    a, b = m.dual(a), m.dual(b)
    return m.with_witness(m.sqrt(m.add(m.mul(a, a), m.mul(b, b))), torch.hypot(a.witness, b.witness), a, b)


@rule(aten.tanh)
def _tanh(m: Arithmetic, op: Any, a: Dual) -> Dual:
    a = m.dual(a)
    e = m.exp(m.mul(a, 2))
    return m.with_witness(m.div(m.sub(e, 1), m.add(e, 1)), a.witness.tanh(), a)


@rule(aten.erf)
def _erf(m: Arithmetic, op: Any, a: Dual) -> Dual:
    return m.uninterpreted("erf", a, m.dual(a).witness.erf(), parity=-1)


def _half_tangent(m: Arithmetic, a: Dual) -> Dual:
    """``tan(a / 2)``, known only to be odd. Sine and cosine use it, so that their squares add up to one."""
    return m.uninterpreted("tan of the half", a, (a.witness / 2).tan(), parity=-1)


@rule(aten.sin)
def _sin(m: Arithmetic, op: Any, a: Dual) -> Dual:
    a = m.dual(a)
    return m.with_witness(cosine_and_sine(m, a, partial(_half_tangent, m))[1], a.witness.sin(), a)


@rule(aten.cos)
def _cos(m: Arithmetic, op: Any, a: Dual) -> Dual:
    a = m.dual(a)
    return m.with_witness(cosine_and_sine(m, a, partial(_half_tangent, m))[0], a.witness.cos(), a)


@rule(
    *named("asin acos atan asinh acosh atanh erfinv lgamma digamma special_erfcx special_i0 i0 special_ndtri")
)
def _uninterpreted(m: Arithmetic, op: Any, a: Dual) -> Dual:
    a, name = m.dual(a), op._schema.name.rpartition("::")[2].replace("arc", "a")
    return m.uninterpreted(name, a, op(a.witness), parity=-1 if name in _ODD_FUNCTIONS else 0)


@rule(aten.atan2)
def _atan2(m: Arithmetic, op: Any, y: Any, x: Any) -> Any:
    """The arc tangent of the quotient, plus half a turn if the divisor is negative."""
    y, x = m.dual(y), m.dual(x)
    witness = op(y.witness, x.witness)
    if not bool((witness.isfinite() & (x.witness != 0)).all()):
        return NotImplemented
    quotient = m.div(y, x)
    angle = m.uninterpreted("atan", quotient, quotient.witness.atan(), parity=-1)
    half_turn = m.select(y.witness.signbit(), -math.pi, math.pi)
    return m.with_witness(m.select(x.witness < 0, m.add(angle, half_turn), angle), witness, y, x)


_ODD_FUNCTIONS = {"asin", "asinh", "atan", "atanh", "erfinv"}

# Choices


def _with_dtype_of(a: Dual, result: Dual) -> Dual:
    return result.as_type(a.dtype or torch.float32)


@rule(*named("lt le gt ge eq ne"))
def _comparison(m: Arithmetic, op: Any, a: Any, b: Any) -> Tensor:
    return op.overloadpacket(*m.comparable_witnesses(a, b))  # with two tensors, even if the call has a number


@rule(*named("sign floor ceil trunc sgn"))
def _by_witness(m: Arithmetic, op: Any, a: Dual) -> Dual:
    return m.from_witness(op(m.snap_to_integers(a)), a)


@rule(aten.round)
def _round(m: Arithmetic, op: Any, a: Dual, decimals: int = 0) -> Any:
    if decimals:
        return NotImplemented
    double = m.snap_to_integers(m.mul(a, 2))  # a half goes to the even integer
    return m.from_witness((double / 2).round(), a)


def _selection_rule(
    prefer: Callable[[Tensor, Tensor], Tensor], witness: Callable[[Tensor, Tensor], Tensor]
) -> Callable[..., Dual]:
    def _rule(m: Arithmetic, op: Any, a: Any, b: Any) -> Dual:
        a, b = m.dual(a), m.dual(b)
        return m.select(prefer(a.witness, b.witness), a, b, witness(a.witness, b.witness))

    return _rule


maximum = rule(aten.maximum)(_selection_rule(torch.ge, torch.maximum))
minimum = rule(aten.minimum)(_selection_rule(torch.le, torch.minimum))
rule(aten.fmax)(_selection_rule(lambda a, b: (a >= b) | b.isnan(), torch.fmax))
rule(aten.fmin)(_selection_rule(lambda a, b: (a <= b) | b.isnan(), torch.fmin))


@rule(aten.clamp, aten.hardtanh, aten.clip)
def _clamp(m: Arithmetic, op: Any, a: Dual, min: Any = None, max: Any = None, **bounds: Any) -> Dual:
    if op.overloadpacket is aten.hardtanh:
        min, max = (
            bounds.get("min_val", -1 if min is None else min),
            bounds.get("max_val", 1 if max is None else max),
        )
    result = a if min is None else maximum(m, op, a, min)
    result = result if max is None else minimum(m, op, result, max)
    return _with_dtype_of(a, result) if op._overloadname != "Tensor" else result


@rule(aten.where)
def _where(m: Arithmetic, op: Any, condition: Tensor, a: Any = NotImplemented, b: Any = None) -> Any:
    return NotImplemented if a is NotImplemented else m.select(condition, a, b)


@rule(aten.copysign)
def _copysign(m: Arithmetic, op: Any, a: Any, b: Any) -> Dual:
    a, b = m.dual(a), m.dual(b)
    same = torch.signbit(a.witness) == torch.signbit(b.witness)
    return m.select(same, a, m.neg(a), torch.copysign(a.witness, b.witness))


register_rules(
    {
        aten.abs: lambda m, op, a: m.select(a.witness < 0, m.neg(a), a, a.witness.abs()),
        aten.relu: lambda m, op, a: _with_dtype_of(a, m.select(a.witness > 0, a, 0, a.witness.relu())),
        aten.threshold_backward: lambda m, op, grad, a, threshold: _with_dtype_of(
            grad, m.select(m.dual(a).witness <= threshold, 0, grad)
        ),
        aten.frac: lambda m, op, a: m.sub(a, m.from_witness(m.snap_to_integers(a).trunc(), a)),
        aten.clamp_min: lambda m, op, a, bound: maximum(m, op, a, bound),
        aten.clamp_max: lambda m, op, a, bound: minimum(m, op, a, bound),
        aten.masked_fill: lambda m, op, a, mask, value: _with_dtype_of(a, m.select(mask, value, a)),
    }
)


# Several steps at once


register_rules(
    {
        aten.lerp: lambda m, op, a, b, weight: m.add(a, m.mul(weight, m.sub(b, a))),
        aten.addcmul: lambda m, op, a, b, c, value=1: m.add(a, m.mul(m.mul(b, c), value)),
        aten.addcdiv: lambda m, op, a, b, c, value=1: m.add(a, m.mul(m.div(b, c), value)),
        "prims::fma": lambda m, op, a, b, c: m.add(m.mul(a, b), c),
    }
)


@rule("aten::fake_quantize_per_tensor_affine_cachemask")
def _fake_quantize(
    m: Arithmetic, op: Any, a: Dual, scale: Any, zero: Any, low: int, high: int
) -> tuple[Dual, Tensor]:
    shifted = m.add(_round(m, op, m.div(a, scale)), zero)
    inside = (shifted.witness >= low) & (shifted.witness <= high)
    result = m.mul(m.sub(m.from_witness(shifted.witness.clamp(low, high), a), zero), scale)
    return _with_dtype_of(a, result), inside


@rule("aten::fake_quantize_per_channel_affine_cachemask")
def _fake_quantize_channels(
    m: Arithmetic, op: Any, a: Dual, scale: Dual, zero: Any, axis: int, low: int, high: int
) -> tuple[Dual, Tensor]:
    shape = [-1 if d == axis % a.dim() else 1 for d in range(a.dim())]
    zeros = zero.map(lambda t: t.view(shape)) if isinstance(zero, Dual) else zero.view(shape)
    return _fake_quantize(m, op, a, scale.map(lambda t: t.view(shape)), zeros, low, high)
