"""The numbers in a graph: known ones, and symbolic sizes of its inputs."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from fxpasses.regional import _torch


def value_of(node: fx.Node) -> Any:
    """Return the fake value of a node, as set by Dynamo or in an ATen graph."""
    meta = node.meta
    return meta["example_value"] if "example_value" in meta else meta.get("val")


def simplify_stride(stride: Any) -> Any:
    """Simplify a stride for tensors that have elements.

    Torch writes the stride over a dimension of ``n`` elements as ``Max(1, n)``, unless it took the strides
    from another tensor. The two differ only for empty tensors, whose strides mean nothing.
    """
    if not isinstance(stride, sympy.Basic) or not stride.has(_torch.Max):
        return stride
    return stride.replace(
        lambda e: isinstance(e, _torch.Max) and len(e.args) == 2 and sympy.S.One in e.args,
        lambda e: next(a for a in e.args if a != 1),
    )


def sizes_of_inputs(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Map symbolic sizes (and floats of sizes) computed from inputs alone to the first equal node.

    Dynamo computes each at first use, in the first of several equal layers. A region recomputes them from the
    symbols, so they are not calls of the layer, and the calls that compute them stay outside.
    """
    first: dict[Any, fx.Node] = {}
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        value = value_of(node)
        if not isinstance(value, (torch.SymInt, torch.SymFloat)):
            continue
        if not isinstance(_torch.expression(value), sympy.Basic) or not _torch.depends_only_on_sizes(value):
            continue
        computed = node.op == "call_function" and all(
            n in found or is_literal(n) for n in node.all_input_nodes
        )
        if node.op == "placeholder" or (
            computed and node.all_input_nodes and _is_pure_arithmetic(node.target)
        ):
            found[node] = first.setdefault(_torch.expression(value), node)
    return found


def _is_pure_arithmetic(target: Any) -> bool:
    """Whether a function of numbers only computes a number, so that it can be recomputed."""
    return getattr(target, "__module__", "") in ("_operator", "math") or "sym_" in getattr(
        target, "__name__", ""
    )


def is_literal(node: fx.Node) -> bool:
    """Whether the node's value is a known number (for example a float that Dynamo has specialized)."""
    if node.op in ("get_attr", "output"):
        return False
    value = value_of(node)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and not isinstance(
        _torch.expression(value), sympy.Basic
    )


def literal(node: fx.Node) -> Any:
    """Return the number that :func:`is_literal` found."""
    return _torch.expression(value_of(node))
