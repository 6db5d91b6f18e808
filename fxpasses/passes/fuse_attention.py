"""Replace unfused attention with one call of the attention kernel."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fake.seam.dispatch import disable_current_modes
from fxpasses.graphs.rewriting import replace, value_of
from fxpasses.pass_manager.pass_base import Contract, Pass
from fxpasses.pass_manager.sites import claim
from fxpasses.passes._matching import RESHAPES, calls_before, constant_value, find_calls, is_call, shape_of

aten = torch.ops.aten

_KERNEL = aten._scaled_dot_product_flash_attention_for_cpu.default
Call = Callable[..., fx.Node]
_MASKED_SCORE = -1e30
"""A mask value at or below this hides a score: beside any other score of the row, its exponential is zero."""


@dataclass(frozen=True)
class FuseAttention(Pass):
    """Compute ``softmax(q @ k.T * scale + mask) @ v`` without materializing the scores of all pairs.

    Models with their own attention (``attn_implementation="eager"`` in transformers) compute scores, softmax
    and the second matmul one after the other, so the scores pass through memory several times. The CPU kernel
    processes the keys in blocks.

    Before::

        scores = aten.view(aten.bmm(q, aten.permute(k, [0, 2, 1])), [2, 4, 12, 12])   # q, k, v: f32[8, 12, 16]
        scores = aten.add(aten.mul(scores, 0.25), mask)
        exp = aten.exp(aten.sub(scores, aten.amax(scores, [-1], True)))
        weights = aten.div(exp, aten.sum(exp, [-1], True))
        out = aten.bmm(aten.view(weights, [8, 12, 12]), v)

    After::

        heads = [aten.view(x, [2, 4, 12, 16]) for x in (q, k, v)]
        out = aten._scaled_dot_product_flash_attention_for_cpu(*heads, attn_mask=mask, scale=0.25)[0]
        out = aten.view(out, [8, 12, 16])

    A constant causal mask becomes the kernel's own, which skips half of the matmuls.

    Applies to float32 on the CPU, for inference. In bfloat16 the kernel is slower than two matmuls here, and
    in training the weights are saved anyway. A row whose scores are all minus infinity is NaN before, and may
    be zero after. Equal up to rounding.
    """

    name: ClassVar[str] = "fuse_attention"
    contract: ClassVar[Contract] = Contract(("inference",), numerics="tolerance")

    def apply(self, gm: fx.GraphModule) -> bool:
        changed = False
        for matmul in find_calls(gm.graph, aten.bmm.default):
            found = _attention(matmul)
            if found is not None and claim(matmul):
                _replace(matmul, found, _is_causal(gm, found))
                changed = True
        return changed


@dataclass(frozen=True)
class _Attention:
    """The operands of ``softmax(query @ key * scale + mask) @ value``.

    Attributes:
        query: left factor of the scores, ``[n, rows, width]``.
        key: right factor of the scores, ``[n, width, columns]``.
        value: ``[n, columns, width]``.
        shape: the shape of the scores in the softmax: ``[..., rows, columns]``.
        scale: a number.
        mask: a tensor that is added to the scores, or None.
    """

    query: fx.Node
    key: fx.Node
    value: fx.Node
    shape: tuple[int, ...]
    scale: float
    mask: fx.Node | None


def _attention(matmul: fx.Node) -> _Attention | None:
    weights, value = matmul.args
    if is_call(weights, *RESHAPES) and _has_one_user(weights):
        weights = weights.args[0]
    scores = _softmax_input(weights)
    shape = shape_of(scores)
    if scores is None or shape is None or len(shape) not in (3, 4) or not isinstance(value, fx.Node):
        return None
    mask: fx.Node | None = None
    if is_call(scores, aten.add.Tensor) and not scores.kwargs:
        left, right = scores.args
        if not (isinstance(left, fx.Node) and isinstance(right, fx.Node)):
            return None
        scores, mask = left, right
        if not _has_one_user(scores) or shape_of(scores) != shape:
            return None
    scale = 1.0
    if is_call(scores, aten.mul.Tensor, aten.div.Tensor) and isinstance(scores.args[1], (int, float)):
        factor = float(scores.args[1])
        scale = factor if scores.target is aten.mul.Tensor else 1 / factor if factor else 0.0
        scores = scores.args[0]  # type: ignore[assignment]
        if not _has_one_user(scores):
            return None
    if is_call(scores, *RESHAPES):
        scores = scores.args[0]  # type: ignore[assignment]
        if not _has_one_user(scores):
            return None
    if not is_call(scores, aten.bmm.default):
        return None
    query, key = scores.args
    if not (isinstance(query, fx.Node) and isinstance(key, fx.Node)):
        return None
    found = _Attention(query, key, value, shape, scale, mask)
    return found if _is_supported(matmul, scores, found) else None


def _softmax_input(weights: object) -> fx.Node | None:
    """Return the scores whose softmax (last dimension) is ``weights``, if the steps have no other use."""
    if not is_call(weights, aten.div.Tensor) or not _has_one_user(weights):
        return None
    exp, total = weights.args
    if not is_call(exp, aten.exp.default) or not is_call(total, aten.sum.dim_IntList):
        return None
    if total.args[0] is not exp or not _reduces_last_dim(total) or set(exp.users) != {weights, total}:
        return None
    shifted = exp.args[0]
    if not is_call(shifted, aten.sub.Tensor) or shifted.kwargs or not _has_one_user(shifted):
        return None
    scores, largest = shifted.args
    if not is_call(largest, aten.amax.default) or largest.args[0] is not scores or not _has_one_user(largest):
        return None
    if not _reduces_last_dim(largest) or not isinstance(scores, fx.Node) or len(scores.users) != 2:
        return None
    return scores


def _reduces_last_dim(reduction: fx.Node) -> bool:
    rank = value_of(reduction.args[0]).dim()  # type: ignore[arg-type]
    dims = reduction.args[1] if len(reduction.args) > 1 else []
    keeps = len(reduction.args) > 2 and bool(reduction.args[2])
    return keeps and not reduction.kwargs and [d % rank for d in dims] == [rank - 1]  # type: ignore[union-attr]


def _has_one_user(node: object) -> bool:
    return isinstance(node, fx.Node) and len(node.users) == 1


def _is_supported(matmul: fx.Node, scores: fx.Node, found: _Attention) -> bool:
    """Whether the kernel takes these: float32/64 on CPU, static sizes, values as wide as keys, rows kept."""
    nodes = [matmul, scores, found.query, found.key, found.value, *([found.mask] if found.mask else [])]
    values = [value_of(n) for n in nodes]
    dtype = values[0].dtype
    if dtype not in (torch.float32, torch.float64) or any(
        v.dtype is not dtype or v.device.type != "cpu" for v in values
    ):
        return False
    shapes = [shape_of(n) for n in nodes]
    if None in shapes or any(0 in s for s in shapes if s is not None):
        return False
    query, key, value = shapes[2], shapes[3], shapes[4]
    assert query is not None
    assert key is not None
    assert value is not None
    return (
        query[2] == value[2]
        and found.shape[-2:] == (query[1], key[2])
        and shape_of(matmul) == query
        and (found.mask is None or shapes[5][-1:] == found.shape[-1:])  # type: ignore[index]
    )


def _is_causal(gm: fx.GraphModule, found: _Attention) -> bool:
    """Whether the mask is a constant that hides all later positions of each row. The kernel skips them."""
    *_, rows, columns = found.shape
    if found.mask is None or rows != columns:
        return False
    mask = constant_value(gm, found.mask)
    if mask is None:
        return False
    with disable_current_modes():
        mask = mask.expand(found.shape)
        after = torch.ones(rows, columns, dtype=torch.bool).triu(1)
        return bool((mask[..., ~after] == 0).all() and (mask[..., after] <= _MASKED_SCORE).all())


def _replace(matmul: fx.Node, found: _Attention, causal: bool) -> None:
    call = calls_before(matmul, like=matmul)
    *batch, rows, columns = found.shape
    lead = list(batch) if len(batch) == 2 else [1, *batch]
    width = value_of(found.query).shape[2]
    query = _with_heads(found.query, [*lead, rows, width], call)
    key = call(aten.permute.default, _with_heads(found.key, [*lead, width, columns], call), [0, 1, 3, 2])
    value = _with_heads(found.value, [*lead, columns, width], call)
    mask = None
    if found.mask is not None and not causal:
        mask = call(aten.expand.default, found.mask, list(found.shape))
        mask = call(aten.unsqueeze.default, mask, 0) if len(batch) == 1 else mask
    given = [_with_contiguous_rows(x, call) for x in (query, key, value)]
    both = call(_KERNEL, *given, 0.0, causal, attn_mask=mask, scale=found.scale)
    out = call(aten.clone.default, call(operator.getitem, both, 0), memory_format=torch.contiguous_format)
    replace(matmul, call(aten.view.default, out, list(value_of(matmul).shape)))


def _with_heads(node: fx.Node, shape: list[int], call: Call) -> fx.Node:
    """Return the value with separate batch and head dimensions: what was copied to merge them, if known."""
    source = node.args[0] if is_call(node, *RESHAPES) else None
    if is_call(source, aten.clone.default):
        source = source.args[0]
    if isinstance(source, fx.Node) and shape_of(source) == tuple(shape):
        return source
    dense = call(aten.clone.default, node, memory_format=torch.contiguous_format)
    return call(aten.view.default, dense, shape)


def _with_contiguous_rows(node: fx.Node, call: Call) -> fx.Node:
    """Return a value whose last dimension is contiguous, as the kernel requires."""
    if value_of(node).stride(-1) == 1:
        return node
    return call(aten.clone.default, node, memory_format=torch.contiguous_format)
