"""Faults in real models: mistakes that somebody optimizing the model could make, mostly at one spot."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxpasses
from benchmarks.planted import programs
from benchmarks.planted.plant import (
    Plant,
    Workload,
    call_before,
    calls,
    gradients,
    in_place_of,
    known_value,
    put_after,
    swap,
)

aten, prims = torch.ops.aten, torch.ops.prims


@fxpasses.graph_pass(graphs=["joint"])
def short_constant(gm: fx.GraphModule) -> bool:
    """The gradient of gelu with 1 / sqrt(2 pi) to three digits."""
    found = [n for n in calls(gm, aten.mul.Tensor) if n.args[1] == 0.3989422804014327]
    for node in found:
        node.args = (node.args[0], 0.399)
    return bool(found)


@fxpasses.graph_pass(graphs=["joint"])
def unscaled_mask(gm: fx.GraphModule) -> bool:
    """Drops the scale factor from the gradient of the last dropout."""
    found = [
        n
        for n in gradients(calls(gm, aten.mul.Tensor))
        if isinstance(n.args[1], float) and 1 < n.args[1] < 1.2
    ]
    if found:
        swap(found[0], found[0].args[0])
    return bool(found)


@fxpasses.graph_pass(graphs=["joint"])
def last_one_counts(gm: fx.GraphModule) -> bool:
    """In an embedding's gradient, a row that is looked up twice gets the last gradient, not the sum."""
    found = calls(gm, aten._unsafe_masked_index_put_accumulate.default)
    for node in found:
        table, mask, indices, values = node.args
        shaped = mask
        while known_value(shaped).dim() < known_value(values).dim():
            shaped = call_before(node, aten.unsqueeze.default, shaped, -1)
        zeroed = call_before(node, aten.where.ScalarOther, shaped, values, 0.0)
        inside = [
            call_before(node, aten.clamp.default, i, 0, known_value(table).shape[0] - 1) for i in indices
        ]
        in_place_of(node, aten.index_put.default, table, inside, zeroed)
    return bool(found)


@fxpasses.graph_pass(graphs=["joint"])
def padding_learns(gm: fx.GraphModule) -> bool:
    """Gives the padding row a gradient."""
    found = [n for n in gradients(calls(gm, aten.ne.Scalar)) if n.args[1] == 0]
    for node in found:
        node.args = (node.args[0], -1)
    return bool(found)


@fxpasses.graph_pass
def window_of_sixteen(gm: fx.GraphModule) -> bool:
    """Clamps positions to 15."""
    found = [n for n in calls(gm, prims.iota.default) if isinstance(n.args[0], fx.Node)]
    for node in found:
        put_after(node, aten.clamp_max.default, node, 15)
    return bool(found)


@fxpasses.graph_pass
def size_of_today(gm: fx.GraphModule) -> bool:
    """Divides by the size of the first batch."""
    changed = False
    for node in calls(gm, aten.div.Tensor, aten.div.Scalar, aten.mul.Tensor, aten.mul.Scalar):
        size = known_value(node.args[1]) if len(node.args) > 1 else None
        if isinstance(size, (torch.SymInt, torch.SymFloat)):
            node.args = (node.args[0], float(size.node.hint))
            changed = True
    return changed


@fxpasses.graph_pass
def tables_left_empty(gm: fx.GraphModule) -> bool:
    """Leaves tables of zeros that are written to afterwards uninitialized."""
    changed = False
    for node in calls(gm, aten.full.default):
        if node.args[1] == 0 and any(
            u.target in (aten.index_put.default, aten.slice_scatter.default, aten.select_scatter.default)
            for u in node.users
        ):
            value = known_value(node)
            kept = {k: v for k, v in node.kwargs.items() if k in ("dtype", "device")}
            in_place_of(node, aten.empty.memory_format, list(value.shape), **{"dtype": value.dtype, **kept})
            changed = True
    return changed


@fxpasses.graph_pass
def draws_swapped(gm: fx.GraphModule) -> bool:
    """Moves the second of two draws in front of the first."""
    drawn = calls(gm, aten.rand.default)
    for k, first in enumerate(drawn):
        for second in drawn[k + 1 :]:
            if first.args == second.args:
                first.prepend(second)
                return True
    return False


@fxpasses.graph_pass
def one_draw_for_two(gm: fx.GraphModule) -> bool:
    """Shares one dropout mask between two layers; the second draw stays, unused."""
    drawn = calls(gm, aten.rand.default)
    for k, first in enumerate(drawn):
        for second in drawn[k + 1 :]:
            if first.args == second.args:
                second.replace_all_uses_with(first)
                return True
    return False


@fxpasses.graph_pass
def drawn_transposed(gm: fx.GraphModule) -> bool:
    """Transposes a square draw."""
    for node in calls(gm, aten.rand.default):
        shape = list(node.args[0])
        if len(shape) == 4 and shape[-1] == shape[-2]:
            put_after(node, aten.transpose.int, node, -1, -2)
            return True
    return False


@fxpasses.graph_pass
def first_layer_counts(gm: fx.GraphModule) -> bool:
    """Writes the running mean of one norm into that of another of the same size."""
    writes = calls(gm, aten.copy_.default)
    for k, first in enumerate(writes):
        for second in writes[k + 1 :]:
            a, b = known_value(first.args[0]), known_value(second.args[0])
            if a.shape == b.shape and a.dim() == 1:
                one, two = first.args[1], second.args[1]
                nodes = list(gm.graph.nodes)
                if nodes.index(two) < nodes.index(first):
                    first.args, second.args = (first.args[0], two), (second.args[0], one)
                    return True
    return False


class Lstm(nn.Module):
    """An LSTM, written out over its steps."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width = width
        self.of_input, self.of_state = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        state = memory = torch.zeros(x.shape[0], self.width, dtype=x.dtype)
        for step in range(x.shape[1]):
            i, f, g, o = (self.of_input(x[:, step]) + self.of_state(state)).chunk(4, -1)
            memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
            state = o.sigmoid() * memory.tanh()
        return state


def lstm(steps: int = 40, dtype: torch.dtype = torch.float32) -> Workload:
    """Build the LSTM and an input."""
    return lambda: (Lstm().to(dtype), [torch.randn(3, steps, 8, dtype=dtype)])


def _is_forward(node: fx.Node) -> bool:
    return not fxpasses.graphs.provenance.is_backward(node)


@fxpasses.graph_pass
def steps_confused(gm: fx.GraphModule) -> bool:
    """Lets the last step read the input of the step before it."""
    found = [n for n in calls(gm, aten.select.int) if _is_forward(n) and n.args[2] == 39]
    for node in found:
        node.args = (*node.args[:2], 38)
    return bool(found)


@fxpasses.graph_pass
def narrow_norm(gm: fx.GraphModule) -> bool:
    """Squares the input of norms before it is cast up."""
    changed = False
    for node in calls(gm, aten.pow.Tensor_Scalar):
        wide = node.args[0]
        if _is_forward(node) and getattr(wide, "target", None) is prims.convert_element_type.default:
            narrow = call_before(node, aten.pow.Tensor_Scalar, wide.args[0], node.args[1])
            in_place_of(node, prims.convert_element_type.default, narrow, torch.float32)
            changed = True
    return changed


class WideResidual(nn.Module):
    """Layers in bfloat16 that add to a float32 stream."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, dtype=torch.bfloat16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x.to(torch.bfloat16)))
        return x


@fxpasses.graph_pass
def promotion_lost(gm: fx.GraphModule) -> bool:
    """Computes a sum of float32 and bfloat16 in bfloat16 (one of three)."""
    found = [
        n
        for n in calls(gm, aten.add.Tensor)
        if _is_forward(n)
        and {known_value(a).dtype for a in n.args if known_value(a) is not None}
        == {torch.float32, torch.bfloat16}
    ]
    for node in found[1:2]:
        narrow = [
            call_before(node, prims.convert_element_type.default, a, torch.bfloat16)
            if known_value(a).dtype is torch.float32
            else a
            for a in node.args
        ]
        total = call_before(node, aten.add.Tensor, *narrow)
        in_place_of(node, prims.convert_element_type.default, total, torch.float32)
    return len(found) > 1


@fxpasses.graph_pass
def last_key_seen(gm: fx.GraphModule) -> bool:
    """Sets the last key in the mask of all rows."""
    for node in calls(
        gm, aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.masked_fill.Scalar
    ):
        mask = node.args[1] if node.target is aten.masked_fill.Scalar else node.args[0]
        if _is_forward(node) and known_value(mask).dim() >= 2:
            size = known_value(mask).shape[-1]
            edge = call_before(node, aten.select.int, mask, -1, size - 1)
            put = call_before(node, aten.ones_like.default, edge)
            made = call_before(node, aten.select_scatter.default, mask, put, -1, size - 1)
            node.replace_input_with(mask, made)
            return True
    return False


@fxpasses.graph_pass
def last_key_unmasked(gm: fx.GraphModule) -> bool:
    """Unmasks the last key for all rows of a constant mask."""
    for node in calls(gm, aten.lift_fresh_copy.default):
        value = known_value(node)
        if value.dim() == 4 and value.shape[-1] == value.shape[-2]:
            size = value.shape[-1]
            zeros = call_before(node, aten.full.default, list(value.shape[:-1]), 0.0, dtype=value.dtype)
            made = put_after(node, aten.select_scatter.default, node, zeros, -1, size - 1)
            node.prepend(zeros)
            return made is not None
    return False


@fxpasses.graph_pass
def second_expert_first(gm: fx.GraphModule) -> bool:
    """Swaps the weights of the chosen experts."""
    for node in calls(gm, aten.topk.default):
        for user in list(node.users):
            if user.args[1] == 0:
                put_after(user, aten.flip.default, user, [-1])
                return True
    return False


@fxpasses.graph_pass
def conv_bias_of_first(gm: fx.GraphModule) -> bool:
    """Sums a convolution's bias gradient over the first image of the batch only."""
    for node in calls(gm, aten.convolution_backward.default):
        for user in list(node.users):
            if user.args[1] == 2:
                first = call_before(user, aten.slice.Tensor, node.args[0], 0, 0, 1)
                dims = [0, *range(2, known_value(node.args[0]).dim())]
                in_place_of(user, aten.sum.dim_IntList, first, dims)
                return True
    return False


@fxpasses.graph_pass(graphs=["inference"])
def fold_without_epsilon(gm: fx.GraphModule) -> bool:
    """Drops epsilon from a batch norm in inference."""
    found = [
        n
        for n in calls(gm, aten.add.Tensor)
        if isinstance(n.args[1], float) and n.args[1] < 1e-2 and n.args[0].op == "placeholder"
    ]
    for node in found[3:4]:
        swap(node, node.args[0])
    return len(found) > 3


@fxpasses.graph_pass(graphs=["inference"])
def last_token_only(gm: fx.GraphModule) -> bool:
    """Wrong: assumes that only the last token's logits matter in inference, and repeats them."""
    output = next(iter(reversed(gm.graph.nodes)))
    for node in calls(gm, aten.view.default):
        if output in node.users and known_value(node).dim() == 3:
            size = known_value(node).shape[1]
            last = put_after(node, aten.slice.Tensor, node, 1, size - 1, size)
            put_after(last, aten.repeat.default, last, [1, size, 1])
            return True
    return False


_BF16 = torch.bfloat16

PLANTS = {
    "gelu's gradient, bert": Plant((short_constant,), programs.hub("bert")),
    "dropout's gradient, gpt2": Plant((unscaled_mask,), programs.hub("gpt2", training=True)),
    "table's gradient, llama": Plant((last_one_counts,), programs.hub("llama")),
    "padding learns, bert": Plant((padding_learns,), programs.hub("bert")),
    "positions above 15, gpt2": Plant((window_of_sixteen,), programs.hub("gpt2"), dynamic=True),
    "size of today, pooled": Plant(
        (size_of_today,), programs.function(programs.pooled, (6, 4)), dynamic=True
    ),
    "empty tables, mixtral": Plant((tables_left_empty,), programs.hub("mixtral")),
    "empty tables, llama": Plant((tables_left_empty,), programs.hub("llama")),
    "draws swapped, bert": Plant((draws_swapped,), programs.hub("bert", training=True)),
    "one draw for two, bart": Plant((one_draw_for_two,), programs.hub("bart", training=True)),
    "drawn transposed, gpt2": Plant((drawn_transposed,), programs.hub("gpt2", training=True)),
    "running means swapped, resnet": Plant((first_layer_counts,), programs.hub("resnet", training=True)),
    "steps confused, lstm": Plant((steps_confused,), lstm()),
    "norm in bfloat16, llama": Plant((narrow_norm,), programs.hub("llama", dtype=_BF16)),
    "promotion lost": Plant((promotion_lost,), lambda: (WideResidual(), [torch.randn(4, 16)])),
    "last key seen, bert": Plant((last_key_seen,), programs.hub("bert")),
    "last key seen, mistral": Plant((last_key_unmasked,), programs.hub("mistral")),
    "experts' weights, mixtral": Plant((second_expert_first,), programs.hub("mixtral")),
    "convolution's bias, vit": Plant((conv_bias_of_first,), programs.hub("vit")),
    "epsilon lost, resnet": Plant((fold_without_epsilon,), programs.hub("resnet"), training=False),
    "last token only, gpt2": Plant((last_token_only,), programs.hub("gpt2"), training=False),
}
