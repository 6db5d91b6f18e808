"""Operators that compute each element from the elements at its place."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxpasses.exact.arithmetic import Arithmetic
from fxpasses.exact.dual import Dual
from fxpasses.exact.rules.table import named, rule

aten = torch.ops.aten


@rule(aten.add)
def _add(m: Arithmetic, op: Any, a: Any, b: Any, alpha: Any = 1) -> Dual:
    return m.add(a, b, alpha)


@rule(aten.sub)
def _sub(m: Arithmetic, op: Any, a: Any, b: Any, alpha: Any = 1) -> Dual:
    return m.sub(a, b, alpha)


@rule(aten.rsub)
def _rsub(m: Arithmetic, op: Any, a: Any, b: Any, alpha: Any = 1) -> Dual:
    return m.sub(b, a, alpha)


@rule(aten.mul)
def _mul(m: Arithmetic, op: Any, a: Any, b: Any) -> Dual:
    return m.mul(a, b)


@rule(aten.div)
def _div(m: Arithmetic, op: Any, a: Any, b: Any, rounding_mode: str | None = None) -> Dual:
    if rounding_mode is None:
        return m.div(a, b)
    quotient = m.div(a, b)
    whole = m.whole(quotient)
    return m.encoded(whole.floor() if rounding_mode == "floor" else whole.trunc(), quotient)


@rule(aten.floor_divide)
def _floor_divide(m: Arithmetic, op: Any, a: Any, b: Any) -> Dual:
    return _div(m, op, a, b, "floor")


@rule(aten.remainder)
def _remainder(m: Arithmetic, op: Any, a: Any, b: Any) -> Dual:
    return m.sub(a, m.mul(b, _div(m, op, a, b, "floor")))


@rule(aten.fmod)
def _fmod(m: Arithmetic, op: Any, a: Any, b: Any) -> Dual:
    return m.sub(a, m.mul(b, _div(m, op, a, b, "trunc")))


@rule(aten.neg)
def _neg(m: Arithmetic, op: Any, a: Dual) -> Dual:
    return m.neg(a)


@rule(aten.reciprocal)
def _reciprocal(m: Arithmetic, op: Any, a: Dual) -> Dual:
    return m.reciprocal(a)


@rule(aten.sqrt)
def _sqrt(m: Arithmetic, op: Any, a: Dual) -> Dual:
    return m.root(a)


@rule(aten.rsqrt)
def _rsqrt(m: Arithmetic, op: Any, a: Dual) -> Dual:
    return m.reciprocal(m.root(a))


@rule(aten.square)
def _square(m: Arithmetic, op: Any, a: Dual) -> Dual:
    return m.mul(a, a)


@rule(aten.pow)
def _power(m: Arithmetic, op: Any, a: Any, exponent: Any) -> Dual:
    return m.pow(a, exponent)


@rule(aten.exp)
def _exp(m: Arithmetic, op: Any, a: Dual) -> Dual:
    return m.exp(a)


@rule(aten.hypot)
def _hypot(m: Arithmetic, op: Any, a: Any, b: Any) -> Dual:
    a, b = m.dual(a), m.dual(b)
    return m.with_witness(m.root(m.add(m.mul(a, a), m.mul(b, b))), torch.hypot(a.witness, b.witness), a, b)


@rule(aten.exp2)
def _exp2(m: Arithmetic, op: Any, a: Dual) -> Dual:
    a = m.dual(a)
    return m.with_witness(m.exp(m.mul(a, math.log(2))), torch.exp2(a.witness), a)


@rule(aten.expm1)
def _expm1(m: Arithmetic, op: Any, a: Dual) -> Dual:
    a = m.dual(a)
    return m.with_witness(m.sub(m.exp(a), 1), a.witness.expm1(), a)


@rule(aten.log)
def _log(m: Arithmetic, op: Any, a: Dual) -> Dual:
    return m.log(a)


@rule(aten.log2)
def _log2(m: Arithmetic, op: Any, a: Dual) -> Dual:
    a = m.dual(a)
    return m.with_witness(m.mul(m.log(a), 1 / math.log(2)), a.witness.log2(), a)


@rule(aten.log10)
def _log10(m: Arithmetic, op: Any, a: Dual) -> Dual:
    a = m.dual(a)
    return m.with_witness(m.mul(m.log(a), 1 / math.log(10)), a.witness.log10(), a)


@rule(aten.log1p)
def _log1p(m: Arithmetic, op: Any, a: Dual) -> Dual:
    a = m.dual(a)
    return m.with_witness(m.log(m.add(a, 1)), a.witness.log1p(), a)


@rule(aten.tanh)
def _tanh(m: Arithmetic, op: Any, a: Dual) -> Dual:
    a = m.dual(a)
    e = m.exp(m.mul(a, 2))
    return m.with_witness(m.div(m.sub(e, 1), m.add(e, 1)), a.witness.tanh(), a)


@rule(aten.sinh)
def _sinh(m: Arithmetic, op: Any, a: Dual) -> Dual:
    a = m.dual(a)
    return m.with_witness(m.div(m.sub(m.exp(a), m.exp(m.neg(a))), 2), a.witness.sinh(), a)


@rule(aten.cosh)
def _cosh(m: Arithmetic, op: Any, a: Dual) -> Dual:
    a = m.dual(a)
    return m.with_witness(m.div(m.add(m.exp(a), m.exp(m.neg(a))), 2), a.witness.cosh(), a)


@rule(aten.sigmoid)
def _sigmoid(m: Arithmetic, op: Any, a: Dual) -> Dual:
    a = m.dual(a)
    return m.with_witness(m.reciprocal(m.add(m.exp(m.neg(a)), 1)), a.witness.sigmoid(), a)


@rule(aten.erf)
def _erf(m: Arithmetic, op: Any, a: Dual) -> Dual:
    return m.uninterpreted("erf", a, m.dual(a).witness.erf(), parity=-1)


@rule(aten.erfc)
def _erfc(m: Arithmetic, op: Any, a: Dual) -> Dual:
    a = m.dual(a)
    return m.with_witness(m.sub(1, _erf(m, op, a)), a.witness.erfc(), a)


def _half_tangent(m: Arithmetic, a: Dual) -> Dual:
    """``tan(a / 2)``: odd, and nothing else is known of it. Sine and cosine are made of it, so that their squares add up to one."""
    return m.uninterpreted("tan of the half", a, (a.witness / 2).tan(), parity=-1)


@rule(aten.sin)
def _sin(m: Arithmetic, op: Any, a: Dual) -> Dual:
    a = m.dual(a)
    t = _half_tangent(m, a)
    return m.with_witness(m.div(m.add(t, t), m.add(m.mul(t, t), 1)), a.witness.sin(), a)


@rule(aten.cos)
def _cos(m: Arithmetic, op: Any, a: Dual) -> Dual:
    a = m.dual(a)
    squared = m.mul(_half_tangent(m, a), _half_tangent(m, a))
    return m.with_witness(m.div(m.sub(1, squared), m.add(squared, 1)), a.witness.cos(), a)


@rule(aten.tan)
def _tan(m: Arithmetic, op: Any, a: Dual) -> Dual:
    a = m.dual(a)
    return m.with_witness(m.div(_sin(m, op, a), _cos(m, op, a)), a.witness.tan(), a)


@rule(
    *named("asin acos atan asinh acosh atanh erfinv lgamma digamma special_erfcx special_i0 i0 special_ndtri")
)
def _uninterpreted(m: Arithmetic, op: Any, a: Dual) -> Dual:
    a = m.dual(a)
    return m.uninterpreted(op._schema.name, a, op(a.witness))


# Choices


@rule(aten.abs)
def _absolute(m: Arithmetic, op: Any, a: Dual) -> Dual:
    return m.select(a.witness < 0, m.neg(a), a, a.witness.abs())


@rule(aten.relu)
def _relu(m: Arithmetic, op: Any, a: Dual) -> Dual:
    return m.select(a.witness > 0, a, 0, a.witness.relu()).as_type(a.dtype or torch.float32)


@rule(aten.threshold_backward)
def _threshold_backward(m: Arithmetic, op: Any, grad: Dual, a: Any, threshold: float) -> Dual:
    return m.select(m.dual(a).witness <= threshold, 0, grad).as_type(grad.dtype or torch.float32)


@rule(*named("lt le gt ge eq ne"))
def _comparison(m: Arithmetic, op: Any, a: Any, b: Any) -> Tensor:
    return op.overloadpacket(*m.compared(a, b))  # of two tensors, also where the call has a number


def _by_witness(m: Arithmetic, op: Any, a: Dual) -> Dual:
    return m.encoded(op(m.whole(a)), a)


rule(*named("sign floor ceil trunc sgn"))(_by_witness)


@rule(aten.round)
def _round(m: Arithmetic, op: Any, a: Dual, decimals: int = 0) -> Any:
    if decimals:
        return NotImplemented
    double = m.whole(m.mul(a, 2))  # a half goes to the even integer
    return m.encoded((double / 2).round(), a)


@rule(aten.frac)
def _frac(m: Arithmetic, op: Any, a: Dual) -> Dual:
    return m.sub(a, m.encoded(m.whole(a).trunc(), a))


def _choice(
    prefer: Callable[[Tensor, Tensor], Tensor], witness: Callable[[Tensor, Tensor], Tensor]
) -> Callable[..., Dual]:
    def _rule(m: Arithmetic, op: Any, a: Any, b: Any) -> Dual:
        a, b = m.dual(a), m.dual(b)
        return m.select(prefer(a.witness, b.witness), a, b, witness(a.witness, b.witness))

    return _rule


maximum = rule(aten.maximum)(_choice(torch.ge, torch.maximum))
minimum = rule(aten.minimum)(_choice(torch.le, torch.minimum))
rule(aten.fmax)(_choice(lambda a, b: (a >= b) | b.isnan(), torch.fmax))
rule(aten.fmin)(_choice(lambda a, b: (a <= b) | b.isnan(), torch.fmin))


@rule(aten.clamp, aten.hardtanh, aten.clip)
def _clamp(m: Arithmetic, op: Any, a: Dual, min: Any = None, max: Any = None, **bounds: Any) -> Dual:
    if op.overloadpacket is aten.hardtanh:
        min, max = (
            bounds.get("min_val", -1 if min is None else min),
            bounds.get("max_val", 1 if max is None else max),
        )
    result = a if min is None else maximum(m, op, a, min)
    result = result if max is None else minimum(m, op, result, max)
    return result.as_type(a.dtype or torch.float32) if op._overloadname != "Tensor" else result


@rule(aten.clamp_min)
def _clamp_min(m: Arithmetic, op: Any, a: Dual, bound: Any) -> Dual:
    return maximum(m, op, a, bound)


@rule(aten.clamp_max)
def _clamp_max(m: Arithmetic, op: Any, a: Dual, bound: Any) -> Dual:
    return minimum(m, op, a, bound)


@rule(aten.where)
def _where(m: Arithmetic, op: Any, condition: Tensor, a: Any = NotImplemented, b: Any = None) -> Any:
    return NotImplemented if a is NotImplemented else m.select(condition, a, b)


@rule(aten.masked_fill)
def _masked_fill(m: Arithmetic, op: Any, a: Dual, mask: Tensor, value: Any) -> Dual:
    return m.select(mask, value, a).as_type(a.dtype or torch.float32)


@rule(aten.copysign)
def _copysign(m: Arithmetic, op: Any, a: Any, b: Any) -> Dual:
    a, b = m.dual(a), m.dual(b)
    same = torch.signbit(a.witness) == torch.signbit(b.witness)
    return m.select(same, a, m.neg(a), torch.copysign(a.witness, b.witness))


# Several steps at once


@rule(aten.lerp)
def _lerp(m: Arithmetic, op: Any, a: Dual, b: Dual, weight: Any) -> Dual:
    return m.add(a, m.mul(weight, m.sub(b, a)))


@rule(aten.addcmul)
def _addcmul(m: Arithmetic, op: Any, a: Any, b: Any, c: Any, value: Any = 1) -> Dual:
    return m.add(a, m.mul(m.mul(b, c), value))


@rule("prims::fma")
def _fma(m: Arithmetic, op: Any, a: Any, b: Any, c: Any) -> Dual:
    return m.add(m.mul(a, b), c)


@rule(aten.addcdiv)
def _addcdiv(m: Arithmetic, op: Any, a: Any, b: Any, c: Any, value: Any = 1) -> Dual:
    return m.add(a, m.mul(m.div(b, c), value))


@rule("aten::fake_quantize_per_tensor_affine_cachemask")
def _fake_quantize(
    m: Arithmetic, op: Any, a: Dual, scale: Any, zero: Any, low: int, high: int
) -> tuple[Dual, Tensor]:
    shifted = m.add(_round(m, op, m.div(a, scale)), zero)
    inside = (shifted.witness >= low) & (shifted.witness <= high)
    result = m.mul(m.sub(m.encoded(shifted.witness.clamp(low, high), a), zero), scale)
    return result.as_type(a.dtype or torch.float32), inside


@rule("aten::fake_quantize_per_channel_affine_cachemask")
def _fake_quantize_channels(
    m: Arithmetic, op: Any, a: Dual, scale: Dual, zero: Any, axis: int, low: int, high: int
) -> tuple[Dual, Tensor]:
    shape = [-1 if d == axis % a.dim() else 1 for d in range(a.dim())]
    zeros = zero.map(lambda t: t.view(shape)) if isinstance(zero, Dual) else zero.view(shape)
    return _fake_quantize(m, op, a, scale.map(lambda t: t.view(shape)), zeros, low, high)
