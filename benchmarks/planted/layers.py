"""Faults in layers of real models (heads, masks, norms, convolutions, draws), written blind to the checks."""

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


def _forward(nodes: list[fx.Node]) -> list[fx.Node]:
    return [n for n in nodes if not fxpasses.graphs.provenance.is_backward(n)]


def _comes_from(node: object, *targets: object) -> fx.Node | None:
    """Return the call of one of the targets behind a node, looking through copies."""
    while isinstance(node, fx.Node) and node.target is aten.clone.default:
        node = node.args[0]
    return node if isinstance(node, fx.Node) and node.target in targets else None


@fxpasses.graph_pass
def heads_tiled(gm: fx.GraphModule) -> bool:
    """Tiles keys of grouped heads (k1 k2 k1 k2) instead of repeating each (k1 k1 k2 k2)."""
    changed = False
    for node in _forward(calls(gm, aten.view.default)):
        expanded = _comes_from(node.args[0], aten.expand.default)
        unsqueezed = _comes_from(expanded.args[0], aten.unsqueeze.default) if expanded else None
        if unsqueezed is not None and known_value(expanded).dim() == 5 and unsqueezed.args[1] == 2:
            groups = known_value(expanded).shape[2]
            tiled = call_before(node, aten.repeat.default, unsqueezed.args[0], [1, groups, 1, 1])
            in_place_of(node, aten.view.default, tiled, list(known_value(node).shape))
            changed = True
    return changed


@fxpasses.graph_pass(graphs=["joint"])
def group_learns_from_its_first(gm: fx.GraphModule) -> bool:
    """Takes a shared key's gradient from the first of its heads, times their number."""
    for node in gradients(calls(gm, aten.sum.dim_IntList)):
        value = known_value(node.args[0])
        if value.dim() == 5 and list(node.args[1]) == [2]:
            first = call_before(node, aten.slice.Tensor, node.args[0], 2, 0, 1)
            in_place_of(node, aten.mul.Tensor, first, value.shape[2])
            return True
    return False


@fxpasses.graph_pass(graphs=["joint"])
def turned_the_same_way(gm: fx.GraphModule) -> bool:
    """Rotates the gradient of a rotation forward once more: the wrong half is negated (one of four)."""
    found = [
        n
        for n in gradients(calls(gm, aten.neg.default))
        if getattr(n.args[0], "target", None) is aten.slice.Tensor
    ]
    if not found:
        return False
    (rotated,) = [u for u in found[-1].users if u.target is aten.slice_scatter.default]
    (total,) = rotated.users
    put_after(total, aten.neg.default, total)
    return True


@fxpasses.graph_pass
def nobody_is_masked(gm: fx.GraphModule) -> bool:
    """Replaces the padding mask with ones."""
    found = [n for n in calls(gm, aten.index.Tensor) if known_value(n).dtype in (torch.bool, torch.int64)]
    for node in found:
        shape, dtype = list(known_value(node).shape), known_value(node).dtype
        in_place_of(node, aten.full.default, shape, dtype is torch.bool or 1, dtype=dtype)
    return bool(found)


@fxpasses.graph_pass
def biased_memory(gm: fx.GraphModule) -> bool:
    """Drops the factor n / (n - 1) from the running variance of one batch norm."""
    found = [
        n
        for n in calls(gm, aten.mul.Tensor)
        if isinstance(n.args[1], float) and 1 < n.args[1] < 1.2 and _comes_from(n.args[0], aten.squeeze.dims)
    ]
    for node in found[2:3]:
        swap(node, node.args[0])
    return len(found) > 2


@fxpasses.graph_pass
def momentum_reversed(gm: fx.GraphModule) -> bool:
    """Swaps the momentum: 0.9 of the new value and 0.1 of the old."""
    found = [n for n in calls(gm, aten.mul.Tensor) if n.args[1] in (0.1, 0.9)]
    for node in found:
        node.args = (node.args[0], 1 - node.args[1])
    return bool(found)


@fxpasses.graph_pass
def shortcut_takes_odd_pixels(gm: fx.GraphModule) -> bool:
    """A 1x1 convolution with stride two as one on every second pixel, but the wrong ones."""
    changed = False
    for node in calls(gm, aten.convolution.default):
        x, weight, bias, stride, padding = node.args[:5]
        if (
            list(known_value(weight).shape[2:]) == [1, 1]
            and list(stride) == [2, 2]
            and list(padding) == [0, 0]
        ):
            for dim in (2, 3):
                x = call_before(node, aten.slice.Tensor, x, dim, 1, 9223372036854775807, 2)
            in_place_of(node, aten.convolution.default, x, weight, bias, [1, 1], padding, *node.args[5:])
            changed = True
    return changed


@fxpasses.graph_pass
def border_counts(gm: fx.GraphModule) -> bool:
    """Counts padding in average pooling at the border of an image."""
    found = calls(gm, aten.avg_pool2d.default)
    for node in found[1:2]:
        node.args = (*node.args[:5], True)
    return len(found) > 1


@fxpasses.graph_pass(graphs=["joint"])
def border_counts_for_the_gradient(gm: fx.GraphModule) -> bool:
    """Counts padding in the gradient of the last average pooling only."""
    found = calls(gm, aten.avg_pool2d_backward.default)
    for node in found[:1]:
        node.args = (*node.args[:6], True, *node.args[7:])
    return bool(found)


@fxpasses.graph_pass
def sees_one_step_ahead(gm: fx.GraphModule) -> bool:
    """Cuts the result of a causal convolution one step too late."""
    for node in _forward(calls(gm, aten.slice.Tensor)):
        convolved = _comes_from(node.args[0], aten.convolution.default, aten.squeeze.dim)
        if convolved is not None and len(node.args) == 4 and node.args[2] == 0:
            node.args = (*node.args[:2], 1, node.args[3] + 1)
            return True
    return False


@fxpasses.graph_pass
def one_step_of_euler(gm: fx.GraphModule) -> bool:
    """exp(step * rate) as 1 + step * rate in one layer of a state space model: good for small steps."""
    for node in _forward(calls(gm, aten.exp.default)):
        if known_value(node).dim() == 4:
            in_place_of(node, aten.add.Tensor, node.args[0], 1.0)
            return True
    return False


@fxpasses.graph_pass
def no_cap(gm: fx.GraphModule) -> bool:
    """50 * tanh(x / 50) as x: the same for small numbers."""
    for node in _forward(calls(gm, aten.mul.Tensor)):
        inner = _comes_from(node.args[0], aten.tanh.default)
        if inner is not None and isinstance(node.args[1], (int, float)) and node.args[1] > 1:
            swap(node, inner.args[0].args[0])
            return True
    return False


@fxpasses.graph_pass
def keys_and_values_exchanged(gm: fx.GraphModule) -> bool:
    """Merges three products of one input and splits the result in another order (one layer)."""
    products: dict[tuple[fx.Node, tuple[int, ...]], list[fx.Node]] = {}
    for node in _forward(calls(gm, aten.addmm.default)):
        products.setdefault((node.args[1], tuple(known_value(node).shape)), []).append(node)
    same = [nodes for nodes in products.values() if len(nodes) == 3]
    if not same:
        return False
    _, k, v = same[-1]
    weight = call_before(k, aten.permute.default, v.args[2].args[0], [1, 0])
    own, other = k.args, v.args
    in_place_of(v, aten.addmm.default, *own)
    k.args = (other[0], own[1], weight)
    return True


@fxpasses.graph_pass
def one_mask_for_the_batch(gm: fx.GraphModule) -> bool:
    """Draws one mask and uses it for the whole batch."""
    for node in calls(gm, aten.rand.default):
        shape = list(node.args[0])
        if len(shape) == 3 and shape[0] > 1:
            first = put_after(node, aten.slice.Tensor, node, 0, 0, 1)
            put_after(first, aten.expand.default, first, shape)
            return True
    return False


@fxpasses.graph_pass
def draws_in_bfloat16(gm: fx.GraphModule) -> bool:
    """Draws random numbers in bfloat16 where float32 is compared."""
    found = [n for n in calls(gm, aten.rand.default) if known_value(n).dtype is torch.float32]
    for node in found[:1]:
        kept = {k: v for k, v in node.kwargs.items() if k != "dtype"}
        drawn = in_place_of(node, aten.rand.default, *node.args, **{**kept, "dtype": torch.bfloat16})
        put_after(drawn, prims.convert_element_type.default, drawn, torch.float32)
    return bool(found)


@fxpasses.graph_pass
def gelu_in_bfloat16(gm: fx.GraphModule) -> bool:
    """Rounds the argument of erf to bfloat16, in one layer of a bfloat16 model."""
    found = _forward(calls(gm, aten.erf.default))
    for node in found[-1:]:
        narrow = call_before(node, prims.convert_element_type.default, node.args[0], torch.bfloat16)
        node.args = (call_before(node, prims.convert_element_type.default, narrow, torch.float32),)
    return bool(found)


@fxpasses.graph_pass(graphs=["joint"])
def softmax_gradient_in_bfloat16(gm: fx.GraphModule) -> bool:
    """Rounds the sum in softmax's gradient to bfloat16, in one layer of a bfloat16 model."""
    found = [
        n
        for n in gradients(calls(gm, aten.sum.dim_IntList))
        if known_value(n).dtype is torch.float32 and known_value(n).dim() == 4 and list(n.args[1]) == [-1]
    ]
    for node in found[-1:]:
        narrow = put_after(node, prims.convert_element_type.default, node, torch.bfloat16)
        put_after(narrow, prims.convert_element_type.default, narrow, torch.float32)
    return bool(found)


@fxpasses.graph_pass(graphs=["joint"])
def gradients_in_half(gm: fx.GraphModule) -> bool:
    """Stores the gradient of one layer's input in float16: small ones become zero."""
    found = [n for n in gradients(calls(gm, aten.mm.default)) if known_value(n).dtype is torch.float32]
    for node in found[2:3]:
        narrow = put_after(node, prims.convert_element_type.default, node, torch.float16)
        put_after(narrow, prims.convert_element_type.default, narrow, torch.float32)
    return len(found) > 2


@fxpasses.graph_pass
def padded_with_garbage(gm: fx.GraphModule) -> bool:
    """Pads the summed dimension of a matmul to a multiple of eight with uninitialized memory."""
    changed = False
    for node in calls(gm, aten.mm.default):
        a, b = node.args
        size = known_value(a).shape[1]
        if isinstance(size, int) and size % 8:
            more = -size % 8
            kind = {"dtype": known_value(a).dtype}
            left = call_before(node, aten.empty.memory_format, [known_value(a).shape[0], more], **kind)
            right = call_before(node, aten.full.default, [more, known_value(b).shape[1]], 0.0, **kind)
            in_place_of(
                node,
                aten.mm.default,
                call_before(node, aten.cat.default, [a, left], 1),
                call_before(node, aten.cat.default, [b, right], 0),
            )
            changed = True
    return changed


class Shortcut(nn.Module):
    """A block with a strided shortcut, grouped channels, and padding on one side."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2)
        self.short = nn.Conv2d(4, 8, 1, stride=2)
        self.last = nn.Conv2d(8, 8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.pad(self.first(x).relu() + self.short(x), (1, 0, 1, 0)))


def shortcut() -> Workload:
    """Build the block and an image."""
    return lambda: (Shortcut(), [torch.randn(2, 4, 8, 8, requires_grad=True)])


@fxpasses.graph_pass
def pads_the_other_side(gm: fx.GraphModule) -> bool:
    """Pads on the right instead of the left."""
    found = _forward(calls(gm, aten.constant_pad_nd.default))
    for node in found[:1]:
        pads = list(node.args[1])
        turned = [p for k in range(0, len(pads), 2) for p in (pads[k + 1], pads[k])]
        node.args = (node.args[0], turned, *node.args[2:])
    return bool(found)


_BF16 = torch.bfloat16

PLANTS = {
    "heads tiled, llama": Plant((heads_tiled,), programs.hub("llama")),
    "a group's gradient, mistral": Plant((group_learns_from_its_first,), programs.hub("mistral")),
    "a rotation's gradient, qwen2": Plant((turned_the_same_way,), programs.hub("qwen2")),
    "nobody is masked, bert": Plant((nobody_is_masked,), programs.hub("bert")),
    "biased running variance, resnet": Plant((biased_memory,), programs.hub("resnet", training=True)),
    "momentum reversed, resnet": Plant((momentum_reversed,), programs.hub("resnet", training=True)),
    "odd pixels": Plant((shortcut_takes_odd_pixels,), shortcut()),
    "odd pixels, resnet": Plant(
        (shortcut_takes_odd_pixels,), programs.hub("resnet", depths=[1, 1]), training=False
    ),
    "padding counts, poolformer": Plant((border_counts,), programs.hub("poolformer")),
    "padding counts for gradients": Plant((border_counts_for_the_gradient,), programs.hub("poolformer")),
    "one step ahead, mamba": Plant((sees_one_step_ahead,), programs.hub("mamba")),
    "one step of Euler, mamba": Plant((one_step_of_euler,), programs.hub("mamba")),
    "no cap, gemma2": Plant((no_cap,), programs.hub("gemma2")),
    "keys for values, opt": Plant((keys_and_values_exchanged,), programs.hub("opt")),
    "one mask for the batch, bert": Plant((one_mask_for_the_batch,), programs.hub("bert", training=True)),
    "draws in bfloat16, gpt2": Plant((draws_in_bfloat16,), programs.hub("gpt2", training=True)),
    "gelu in bfloat16, vit": Plant((gelu_in_bfloat16,), programs.hub("vit", dtype=_BF16)),
    "softmax's gradient in bfloat16": Plant(
        (softmax_gradient_in_bfloat16,), programs.hub("bert", dtype=_BF16)
    ),
    "gradients in half, gpt2": Plant((gradients_in_half,), programs.hub("gpt2")),
    "padded with garbage": Plant((padded_with_garbage,), programs.mlp(rows=6)),
    "padded on the other side": Plant((pads_the_other_side,), shortcut()),
}
