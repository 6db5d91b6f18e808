"""The dtypes that a graph computes in: which calls do arithmetic, and which pass elements on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fxpasses._torch import OpOverload
from fxpasses.exact.rules.table import named
from fxpasses.graphs.rewriting import value_of

_SAME_ELEMENTS = {getattr(torch.ops.aten, name) for name in ("alias", "detach", "_to_copy")}
"""What a joint graph saves for the backward pass is an alias."""
_SUMS = {
    getattr(torch.ops.aten, name)
    for name in [
        "sum",
        "mean",
        "cumsum",
        "prod",
        "var",
        "var_mean",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "convolution",
        "scatter_add",
        "index_add",
    ]
}
_COPIES = {
    torch.ops.prims.convert_element_type,
    *(
        getattr(torch.ops.aten, name)
        for name in [
            "_to_copy",
            "clone",
            "copy",
            "fill",
            "where",
            "masked_fill",
            "neg",
            "abs",
            "relu",
            "clamp",
            "maximum",
            "minimum",
        ]
    ),
}
"""Elementwise operators that pass on given elements, or round only as a cast does."""
_INTEGERS = {getattr(torch.ops.aten, name) for name in ("floor", "ceil", "round", "trunc", "sign")}
_SOFTMAX = {
    getattr(torch.ops.aten, f"{name}softmax{end}")
    for name in ("_", "_log_")
    for end in ("", "_backward_data")
}


_TRANSCENDENTAL = set(
    named(
        "acos acosh asin asinh atan atan2 atanh cos cosh elu erf erfc erfinv exp exp2 expm1 gelu lgamma log log10 log1p log2 "
        "log_sigmoid_forward logaddexp logaddexp2 mish pow sigmoid silu sin sinh softplus tan tanh"
    )
)


def is_transcendental(target: Any) -> bool:
    """Whether no kernel rounds an operator correctly: libraries guarantee a few ulps."""
    return isinstance(target, OpOverload) and target.overloadpacket in _TRANSCENDENTAL


def is_elementwise(gm: fx.GraphModule) -> bool:
    """Whether no element that a graph returns is computed from several elements of one value."""
    return all(
        isinstance(n.target, OpOverload)
        and (
            torch.Tag.pointwise in n.target.tags
            or n.target.overloadpacket in _SAME_ELEMENTS
            or not n.all_input_nodes
        )
        for n in gm.graph.nodes
        if n.op == "call_function"
    )


def is_arithmetic(target: Any) -> bool:
    """Whether an operator does arithmetic, elementwise or in sums, rather than pass elements on."""
    if not isinstance(target, OpOverload) or target.overloadpacket in _COPIES | _INTEGERS:
        return False
    return torch.Tag.pointwise in target.tags or target.overloadpacket in _SUMS | _SOFTMAX


def finest_dtype(gm: fx.GraphModule, dtype: torch.dtype) -> torch.dtype:
    """Return the most precise dtype that the graph computes in."""
    kinds = [effective_dtype(n, v.dtype) for n in gm.graph.nodes if _is_float(v := value_of(n))]
    return min([dtype, *kinds], key=_eps)


def computing_dtype(gm: fx.GraphModule) -> torch.dtype | None:
    """Return the most precise dtype in which the graph does arithmetic; ``None`` if it does none."""
    kinds = [
        value.dtype
        for node in gm.graph.nodes
        if isinstance(node.target, OpOverload) and node.target.overloadpacket not in _COPIES
        if torch.Tag.pointwise in node.target.tags or node.target.overloadpacket in _SUMS
        if _is_float(value := value_of(node))
    ]
    return min(kinds, key=_eps, default=None)


def effective_dtype(node: fx.Node, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that limits a value's digits: bfloat16 if computed in it and passed on in float32.

    Args:
        node: the value.
        dtype: its own dtype.
    """
    passes_on = isinstance(node.target, OpOverload) and (
        node.target.is_view or node.target.overloadpacket in _COPIES
    )
    taken = [(n, v.dtype) for n in node.all_input_nodes if passes_on and _is_float(v := value_of(n))]
    given = [effective_dtype(*one) for one in taken]
    return max(dtype, min(given, key=_eps), key=_eps) if given else dtype


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps
