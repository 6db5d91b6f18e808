"""Ranges: bounds on the values of a graph that hold for all inputs.

Interval arithmetic over the calls of a graph, for operators that bound their results (an exponential, a
softmax, a clamp) and those that pass bounds on.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

aten, prims = torch.ops.aten, torch.ops.prims
_EXP_OVERFLOW = 700.0
"""Where the exponential of a float64 overflows."""


@dataclass(frozen=True)
class Range:
    """The numbers that a value may be, both ends included.

    Attributes:
        low: the smallest of them.
        high: the largest.
    """

    low: float = -math.inf
    high: float = math.inf

    def __str__(self) -> str:
        low, high = (f"{end + 0.0:g}" for end in (self.low, self.high))  # drops the sign of a zero
        if math.isinf(self.high):
            return "is any number" if math.isinf(self.low) else f"is at least {low}"
        return f"is at most {high}" if math.isinf(self.low) else f"lies in [{low}, {high}]"


_ANY, _UNIT = Range(), Range(0.0, 1.0)


def _monotone_increasing(f: Callable[[float], float], low: float = -math.inf) -> Callable[..., Range]:
    """Return the rule of an increasing function that is defined from ``low`` on."""
    return lambda a, *_: Range(f(max(a.low, low)), f(max(a.high, low)))


def _monotone_in_both(f: Callable[[float, float], float]) -> Callable[..., Range]:
    """Return the rule of a function of two numbers that is monotone in each."""

    def rule(a: Range, b: Range, *_: Any) -> Range:
        found = [f(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
        return _ANY if any(map(math.isnan, found)) else Range(min(found), max(found))

    return rule


def _product(x: float, y: float) -> float:
    return 0.0 if x == 0 or y == 0 else x * y


def _quotient(a: Range, b: Range) -> Range:
    if b.low < 0 or (a.low < 0 < a.high and b.low == 0):
        return _ANY
    inverse = Range(1 / b.high if b.high else math.inf, 1 / b.low if b.low > 0 else math.inf)
    return _monotone_in_both(_product)(a, inverse)


def _exp(x: float) -> float:
    return math.exp(x) if x < _EXP_OVERFLOW else math.inf


def _abs(a: Range, *_: Any) -> Range:
    least = max(a.low, -a.high, 0.0)
    return Range(least, max(abs(a.low), abs(a.high)))


def _clamp(a: Range, low: Any = None, high: Any = None) -> Range:
    low, high = (v.low if isinstance(v, Range) and v.low == v.high else None for v in (low, high))
    ends = [a.low if low is None else max(a.low, low), a.high if low is None else max(a.high, low)]
    return Range(*(v if high is None else min(v, high) for v in ends))


def _identity(a: Range, *_: Any) -> Range:
    return a


_RULES: dict[Any, Callable[..., Range]] = {
    **dict.fromkeys((aten._softmax, aten.softmax, aten.sigmoid), lambda *_: _UNIT),
    **dict.fromkeys((aten.tanh, aten.erf, aten.sin, aten.cos, aten.sign), lambda *_: Range(-1.0, 1.0)),
    **dict.fromkeys((aten.var, aten.rsqrt), lambda *_: Range(0.0)),
    **dict.fromkeys((aten._log_softmax, aten.log_softmax), lambda *_: Range(high=0.0)),
    **dict.fromkeys((aten.abs, aten.linalg_vector_norm), _abs),
    **dict.fromkeys(
        (aten.sum, aten.cumsum),
        lambda a, *_: Range(min(a.low, 0.0) and -math.inf, max(a.high, 0.0) and math.inf),
    ),
    aten.where: lambda _, a, b: Range(min(a.low, b.low), max(a.high, b.high)),
    aten.clamp: _clamp,
    aten.exp: _monotone_increasing(_exp),
    aten.sqrt: _monotone_increasing(math.sqrt, 0.0),
    aten.relu: _monotone_increasing(lambda x: max(x, 0.0)),
    aten.clamp_min: lambda a, low: _clamp(a, low),
    aten.clamp_max: lambda a, high: _clamp(a, None, high),
    aten.maximum: _monotone_in_both(max),
    aten.minimum: _monotone_in_both(min),
    aten.add: _monotone_in_both(operator.add),
    aten.sub: _monotone_in_both(operator.sub),
    aten.mul: _monotone_in_both(_product),
    aten.div: _quotient,
    aten.full: lambda _, value: value,
    aten.scalar_tensor: _identity,
    aten.neg: lambda a: Range(-a.high, -a.low),
    **dict.fromkeys(
        (
            *(aten.view, aten.expand, aten.permute, aten.unsqueeze, aten.squeeze, aten.slice, aten.select),
            *(aten.clone, aten.alias, aten.reshape, aten.transpose, aten.t, aten._to_copy, aten.detach),
            *(aten.amax, aten.amin, aten.mean, aten.gather, aten.index_select, aten.flip),
            prims.convert_element_type,
        ),
        _identity,
    ),
}
_NON_VALUE_KWARGS = {"dtype", "layout", "device", "pin_memory"}
"""Keyword arguments that do not affect values."""


def ranges(gm: fx.GraphModule) -> dict[str, Range]:
    """Return the range of each value of a graph that is bounded, by name.

    Args:
        gm: a graph of ATen operators.
    """
    found: dict[str, Range] = {}

    def range_of(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return found.get(value.name, _ANY)
        return Range(float(value), float(value)) if isinstance(value, (int, float)) else value

    for node in gm.graph.nodes:
        value, packet = node.meta.get("val"), getattr(node.target, "overloadpacket", None)
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.dtype is torch.bool):
            continue
        rule = _RULES.get(packet)
        value_range = _UNIT if value.dtype is torch.bool else _ANY
        if packet is not None and _is_square(node, packet):
            value_range = Range(0.0)
        elif packet is aten.sub and _is_reduction_of(node.args[1], aten.amax, node.args[0]):
            value_range = Range(high=0.0)
        elif (
            packet is aten.div
            and _is_reduction_of(node.args[1], aten.sum, node.args[0])
            and range_of(node.args[0]).low >= 0
        ):
            value_range = _UNIT
        elif rule is not None and value_range is _ANY and node.kwargs.keys() <= _NON_VALUE_KWARGS:
            value_range = rule(*map(range_of, node.args))
        if value_range != _ANY:
            found[node.name] = value_range
    return found


def _is_square(node: fx.Node, packet: Any) -> bool:
    return (packet is aten.mul and node.args[0] is node.args[1]) or (
        packet is aten.pow and isinstance(node.args[1], (int, float)) and node.args[1] % 2 == 0
    )


def _is_reduction_of(value: Any, packet: Any, source: Any) -> bool:
    """Whether a value is a reduction of another one with ``keepdim``, perhaps expanded."""
    while isinstance(value, fx.Node) and getattr(value.target, "overloadpacket", None) in (
        aten.expand,
        aten.clone,
    ):
        value = value.args[0]
    return (
        isinstance(value, fx.Node)
        and getattr(value.target, "overloadpacket", None) is packet
        and value.args[0] is source
        and len(value.args) > 2
        and bool(value.args[2])
    )
