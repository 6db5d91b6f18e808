"""Faults that only few digits show, and faults that low precision hides."""

from __future__ import annotations

import torch
from torch import fx

import fxpasses
from benchmarks.planted import programs
from benchmarks.planted.plant import Plant, call_before, calls, in_place_of, put_after, swap
from fxpasses.pass_manager.pass_base import FunctionPass
from fxpasses.pass_manager.sites import claim

aten, prims = torch.ops.aten, torch.ops.prims
BF16 = torch.bfloat16


@fxpasses.graph_pass
def products_in_bfloat16(gm: fx.GraphModule) -> bool:
    """Drops the cast to float32 before a product."""
    changed = False
    for node in calls(gm, prims.convert_element_type.default):
        if node.args[1] is torch.float32 and node.args[0].meta["val"].dtype is BF16:
            for user in [u for u in node.users if u.target is aten.mul.Tensor and u.args[0] is node]:
                other = user.args[1]
                if isinstance(other, fx.Node):
                    other = call_before(user, prims.convert_element_type.default, other, BF16)
                narrow = in_place_of(user, aten.mul.Tensor, node.args[0], other)
                put_after(narrow, prims.convert_element_type.default, narrow, torch.float32)
                changed = True
    return changed


@fxpasses.graph_pass
def sums_in_bfloat16(gm: fx.GraphModule) -> bool:
    """Sums in bfloat16, one half after the other, what was summed in float32."""
    changed = False
    for node in calls(gm, aten.sum.dim_IntList):
        x = node.args[0]
        if (
            x.meta["val"].dtype is torch.float32
            and x.meta["val"].dim()
            and not fxpasses.graphs.provenance.is_backward(node)
        ):
            low = call_before(node, prims.convert_element_type.default, x, BF16)
            total = in_place_of(node, aten.sum.dim_IntList, low, *node.args[1:])
            put_after(total, prims.convert_element_type.default, total, torch.float32)
            changed = True
    return changed


@fxpasses.graph_pass
def softmax_in_bfloat16(gm: fx.GraphModule) -> bool:
    """Computes the exponential of a softmax in bfloat16."""
    changed = False
    for node in calls(gm, aten.exp.default):
        if node.meta["val"].dtype is torch.float32:
            low = call_before(node, prims.convert_element_type.default, node.args[0], BF16)
            small = in_place_of(node, aten.exp.default, low)
            put_after(small, prims.convert_element_type.default, small, torch.float32)
            changed = True
    return changed


@fxpasses.graph_pass
def norm_in_bfloat16(gm: fx.GraphModule) -> bool:
    """Computes the square of a norm in bfloat16."""
    changed = False
    for node in calls(gm, aten.pow.Tensor_Scalar):
        if node.meta["val"].dtype is torch.float32 and node.args[1] == 2:
            low = call_before(node, prims.convert_element_type.default, node.args[0], BF16)
            small = in_place_of(node, aten.pow.Tensor_Scalar, low, 2)
            put_after(small, prims.convert_element_type.default, small, torch.float32)
            changed = True
    return changed


@fxpasses.graph_pass
def epsilon_lost(gm: fx.GraphModule) -> bool:
    """Drops an epsilon in bfloat16 as too small to matter."""
    changed = False
    for node in calls(gm, aten.add.Tensor):
        if isinstance(node.args[1], float) and node.args[1] < 1e-4:
            swap(node, node.args[0])
            changed = True
    return changed


@fxpasses.graph_pass
def positions_in_bfloat16(gm: fx.GraphModule) -> bool:
    """Counts positions in bfloat16: right up to 256."""
    changed = False
    for node in calls(gm, prims.convert_element_type.default):
        if node.args[1] is torch.float32 and node.args[0].meta["val"].dtype is torch.int64:
            low = call_before(node, prims.convert_element_type.default, node.args[0], BF16)
            node.args = (low, torch.float32)
            changed = True
    return changed


def scales(factor: float, middle: bool) -> FunctionPass:
    """Return a pass that scales one product (or all) by ``factor`` and the others by one, in bfloat16."""

    def apply(gm: fx.GraphModule) -> bool:
        products = [
            n
            for n in calls(gm, aten.mm.default, aten.addmm.default)
            if n.meta["val"].dtype is BF16 and not fxpasses.graphs.provenance.is_backward(n)
        ]
        for position, node in enumerate(products):
            if claim(node):
                wrong = position == len(products) // 2 or not middle
                put_after(node, aten.mul.Tensor, node, factor if wrong else 1.0)
        return bool(products)

    return fxpasses.graph_pass(apply, name=f"scales_{'one' if middle else 'all'}_by_{factor}")


@fxpasses.graph_pass
def half_a_percent_in_float32(gm: fx.GraphModule) -> bool:
    """Scales the float32 part of a norm by 1.005 in a bfloat16 graph."""
    for node in calls(gm, aten.rsqrt.default):
        put_after(node, aten.mul.Tensor, node, 1.005)
        return True
    return False


@fxpasses.graph_pass
def bias_left_out(gm: fx.GraphModule) -> bool:
    """Drops a small bias in bfloat16."""
    for node in calls(gm, aten.addmm.default)[1:2]:
        in_place_of(node, aten.mm.default, *node.args[1:])
        return True
    return False


@fxpasses.graph_pass
def in_float16(gm: fx.GraphModule) -> bool:
    """Casts to float16 and back: large values overflow, small ones vanish."""
    for node in calls(gm, aten.addmm.default, aten.mm.default)[:1]:
        low = put_after(node, prims.convert_element_type.default, node, torch.float16)
        put_after(low, prims.convert_element_type.default, low, node.meta["val"].dtype)
        return True
    return False


@fxpasses.graph_pass
def truncates_indices(gm: fx.GraphModule) -> bool:
    """Casts indices to 8 bits and back."""
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.meta["val"].dtype is torch.int64 and node.users:
            users = list(node.users)
            first = users[0]
            low = call_before(first, prims.convert_element_type.default, node, torch.int8)
            back = call_before(first, prims.convert_element_type.default, low, torch.int64)
            for user in users:
                user.replace_input_with(node, back)
            return True
    return False


def angles(x: torch.Tensor) -> torch.Tensor:
    """Angles in float32, with a result in bfloat16."""
    return (x.float() * 30.7).sin().to(BF16)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Positions as floating-point numbers, as in rotary embeddings."""
    position = torch.arange(x.shape[0])
    return x * (position.float() * 0.3).cos()[:, None]


def weighted(x: torch.Tensor) -> torch.Tensor:
    """A mean over many bfloat16 values, in float32."""
    return (x.float().exp().sum(-1, keepdim=True) / x.shape[-1]).to(BF16) * x


class Lookup(torch.nn.Module):
    """A table with more rows than a byte can index."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(300, 4)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.table(index).sin()


PLANTS = {
    "products in bfloat16": Plant((products_in_bfloat16,), programs.function(angles, (30, 2), dtype=BF16)),
    "sums in bfloat16": Plant((sums_in_bfloat16,), programs.function(weighted, (4, 600), dtype=BF16)),
    "softmax in bfloat16": Plant((softmax_in_bfloat16,), programs.attention(dtype=BF16)),
    "norm in bfloat16": Plant((norm_in_bfloat16,), programs.hub("llama", dtype=BF16)),
    "an epsilon lost": Plant((epsilon_lost,), programs.hub("llama", dtype=BF16)),
    "positions in bfloat16": Plant(
        (positions_in_bfloat16,),
        programs.function(rotated, (700, 4)),
        options={"passes": [positions_in_bfloat16]},
    ),
    "2% at one product of 8": Plant((scales(1.02, True),), programs.mlp(8, dtype=BF16, rows=16), at="4: "),
    "1% at one product of 8": Plant((scales(1.01, True),), programs.mlp(8, dtype=BF16, rows=16), at="4: "),
    "0.8% at all products": Plant((scales(1.008, False),), programs.mlp(8, dtype=BF16, rows=16)),
    "1% in llama": Plant((scales(1.01, True),), programs.hub("llama", dtype=BF16)),
    "0.5% in float32": Plant((half_a_percent_in_float32,), programs.hub("llama", dtype=BF16)),
    "a small bias left out": Plant((bias_left_out,), programs.mlp(4, dtype=BF16)),
    "cast to float16": Plant((in_float16,), programs.mlp()),
    "indices cast to 8 bits": Plant((truncates_indices,), lambda: (Lookup(), [torch.arange(5)])),
}
