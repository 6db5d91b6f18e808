"""Correct passes that change rounding, layout or order: they must raise no alarm."""

from __future__ import annotations

import torch
from torch import fx

import fxpasses
from benchmarks.planted import programs, stages
from benchmarks.planted.plant import Plant, call_before, calls, in_place_of, put_after

aten, prims = torch.ops.aten, torch.ops.prims


@fxpasses.graph_pass
def products_otherwise(gm: fx.GraphModule) -> bool:
    """(a * b) * c as a * (b * c)."""
    changed = False
    for node in calls(gm, aten.mul.Tensor):
        inner, other = node.args
        if getattr(inner, "target", None) is aten.mul.Tensor and isinstance(other, fx.Node):
            a, b = inner.args
            values = [n.meta["val"] for n in (a, b, other) if isinstance(n, fx.Node)]
            if len(values) == 3 and all(isinstance(v, torch.Tensor) for v in values):
                in_place_of(node, aten.mul.Tensor, a, call_before(node, aten.mul.Tensor, b, other))
                changed = True
    return changed


@fxpasses.graph_pass
def divides_by_multiplying(gm: fx.GraphModule) -> bool:
    """a / b as a * (1 / b)."""
    changed = False
    for node in calls(gm, aten.div.Tensor):
        if isinstance(node.args[1], fx.Node) and isinstance(node.args[1].meta["val"], torch.Tensor):
            in_place_of(
                node, aten.mul.Tensor, node.args[0], call_before(node, aten.reciprocal.default, node.args[1])
            )
            changed = True
    return changed


@fxpasses.graph_pass
def splits_products(gm: fx.GraphModule) -> bool:
    """A matmul as the sum of two, each over half of the summed dimension."""
    changed = False
    for node in calls(gm, aten.mm.default):
        a, b = node.args
        size = a.meta["val"].shape[1]
        if not isinstance(size, int) or size < 2:
            continue
        parts = []
        for start, stop in ((0, size // 2), (size // 2, size)):
            left = call_before(node, aten.slice.Tensor, a, 1, start, stop)
            parts.append(
                call_before(
                    node, aten.mm.default, left, call_before(node, aten.slice.Tensor, b, 0, start, stop)
                )
            )
        in_place_of(node, aten.add.Tensor, *parts)
        changed = True
    return changed


@fxpasses.graph_pass
def unfuses_biases(gm: fx.GraphModule) -> bool:
    """addmm as mm and add."""
    found = calls(gm, aten.addmm.default)
    for node in found:
        bias, a, b = node.args
        in_place_of(node, aten.add.Tensor, call_before(node, aten.mm.default, a, b), bias)
    return bool(found)


@fxpasses.graph_pass
def sums_otherwise(gm: fx.GraphModule) -> bool:
    """A sum over one dimension as a matmul with ones."""
    changed = False
    for node in calls(gm, aten.sum.dim_IntList):
        x = node.args[0]
        value = x.meta["val"]
        if list(node.args[1]) == [0] and value.dim() == 2 and value.is_floating_point():
            ones = call_before(node, aten.full.default, [1, value.shape[0]], 1.0, dtype=value.dtype)
            product = call_before(node, aten.mm.default, ones, x)
            keep = len(node.args) > 2 and node.args[2]
            in_place_of(node, aten.view.default, product, [1, value.shape[1]] if keep else [value.shape[1]])
            changed = True
    return changed


@fxpasses.graph_pass
def norms_from_moments(gm: fx.GraphModule) -> bool:
    """rsqrt(x) as 1 / sqrt(x)."""
    found = calls(gm, aten.rsqrt.default)
    for node in found:
        in_place_of(node, aten.reciprocal.default, call_before(node, aten.sqrt.default, node.args[0]))
    return bool(found)


@fxpasses.graph_pass
def wider(gm: fx.GraphModule) -> bool:
    """Computes bfloat16 matmuls in float32."""
    changed = False
    for node in calls(gm, aten.mm.default):
        if node.meta["val"].dtype is torch.bfloat16:
            wide = [
                call_before(node, prims.convert_element_type.default, n, torch.float32) for n in node.args
            ]
            product = in_place_of(node, aten.mm.default, *wide)
            put_after(product, prims.convert_element_type.default, product, torch.bfloat16)
            changed = True
    return changed


_BF16 = torch.bfloat16

PLANTS = {
    "products, llama": Plant((products_otherwise,), programs.hub("llama")),
    "products, llama in bfloat16": Plant((products_otherwise,), programs.hub("llama", dtype=_BF16)),
    "divisions, bert": Plant((divides_by_multiplying,), programs.hub("bert")),
    "divisions, attention in bfloat16": Plant((divides_by_multiplying,), programs.attention(dtype=_BF16)),
    "split products, gpt": Plant((splits_products,), programs.zoo("gpt")),
    "split products, gpt2 in bfloat16": Plant((splits_products,), programs.hub("gpt2", dtype=_BF16)),
    "biases, vit": Plant((unfuses_biases,), programs.hub("vit")),
    "biases, mlp in bfloat16": Plant((unfuses_biases,), programs.mlp(8, dtype=_BF16)),
    "sums, bert": Plant((sums_otherwise,), programs.hub("bert")),
    "sums, mlp in bfloat16": Plant((sums_otherwise,), programs.mlp(4, dtype=_BF16, rows=64)),
    "roots, llama in bfloat16": Plant((norms_from_moments,), programs.hub("llama", dtype=_BF16)),
    "roots, convnet": Plant((norms_from_moments,), programs.zoo("convnet", 3), dynamic=True),
    "wider products, llama in bfloat16": Plant((wider,), programs.hub("llama", dtype=_BF16)),
    "marks alone": Plant((stages.marks,), programs.mlp(activation=torch.tanh)),
    "with dropout, gpt2": Plant((splits_products, products_otherwise), programs.hub("gpt2", training=True)),
}
