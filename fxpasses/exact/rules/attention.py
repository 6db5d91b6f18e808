"""Attention kernels, by their definition: ``softmax(q @ k.T * scale + mask) @ v``."""

from __future__ import annotations

import math
from typing import Any

import torch

from fxpasses.exact.arithmetic import Arithmetic
from fxpasses.exact.dual import Dual
from fxpasses.exact.rules.table import named, rule

aten = torch.ops.aten


def _transposed(a: Dual) -> Dual:
    return a.map(lambda t: t.transpose(-1, -2))


def _expand_kv_heads(query: Dual, a: Dual) -> Dual:
    """Repeat keys or values for each head of the query: groups of heads may share them."""
    groups = query.shape[-3] // a.shape[-3] if query.dim() > 2 else 1
    return a if groups == 1 else a.map(lambda t: t.repeat_interleave(groups, -3))


def _sum_over_groups(m: Arithmetic, a: Dual, like: Dual) -> Dual:
    """Sum the gradients of each head into those of the keys or values."""
    if a.shape == like.shape:
        return a
    return m.sum(a.map(lambda t: t.unflatten(-3, (like.shape[-3], -1))), [a.dim() - 2])


def _matmul(m: Arithmetic, a: Dual, b: Dual) -> Dual:
    return m.bilinear(torch.matmul, a, b)


def _scores(
    m: Arithmetic, query: Dual, key: Dual, is_causal: bool, mask: Any, scale: float | None
) -> tuple[Dual, float]:
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = m.mul(_matmul(m, query, _transposed(key)), factor)
    if is_causal:
        kept = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = m.select(kept, scores, -math.inf)
    if mask is None:
        return scores, factor
    if isinstance(mask, Dual):
        return m.add(scores, mask), factor
    return m.select(mask, scores, -math.inf), factor


def _softmax(m: Arithmetic, scores: Dual) -> tuple[Dual, Dual]:
    """Return the weights and the log-sum-exp. A fully masked row has weights zero."""
    top = m.extreme(scores, [scores.dim() - 1], True, largest=True)
    masked = top.witness == -math.inf
    top = m.select(masked, 0, top)
    powers = m.exp(m.sub(scores, top))
    total = m.sum(powers, [scores.dim() - 1], True)
    weights = m.select(masked, 0, m.div(powers, m.select(masked, 1, total)))
    return weights, m.add(m.log(total), top)


@rule(*named("_scaled_dot_product_flash_attention_for_cpu"))
def _flash_attention_for_cpu(
    m: Arithmetic,
    op: Any,
    query: Dual,
    key: Dual,
    value: Dual,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> Any:
    if dropout_p:
        return NotImplemented
    key, value = _expand_kv_heads(query, key), _expand_kv_heads(query, value)
    scores, _ = _scores(m, query, key, is_causal, attn_mask, scale)
    weights, total = _softmax(m, scores)
    kind = torch.float32 if query.dtype in (torch.bfloat16, torch.float16) else query.dtype
    result = _matmul(m, weights, value).as_type(query.dtype or torch.float32)
    return result, total.map(lambda t: t.squeeze(-1)).as_type(kind or torch.float32)


def _saved_weights(m: Arithmetic, scores: Dual, logsumexp: Dual) -> Dual:
    """Return the weights for a saved log-sum-exp. A different one makes them a different function."""
    weights, total = _softmax(m, scores)
    saved = logsumexp.map(lambda t: t.unsqueeze(-1))
    if any(bool((r == s).all()) for r, s in zip(total.residues, saved.residues, strict=True)):
        return weights
    return m.exp(m.sub(scores, saved))


@rule(*named("_scaled_dot_product_flash_attention_for_cpu_backward"))
def _flash_attention_for_cpu_backward(
    m: Arithmetic,
    op: Any,
    grad: Dual,
    query: Dual,
    key: Dual,
    value: Dual,
    out: Dual,
    logsumexp: Dual,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> Any:
    if dropout_p:
        return NotImplemented
    keys, values = key, value
    key, value = _expand_kv_heads(query, key), _expand_kv_heads(query, value)
    scores, factor = _scores(m, query, key, is_causal, attn_mask, scale)
    weights = _saved_weights(m, scores, logsumexp)
    grad_value = _matmul(m, _transposed(weights), grad)
    grad_weights = _matmul(m, grad, _transposed(value))
    rows = m.sum(m.mul(grad, out), [grad.dim() - 1], True)
    grad_scores = m.mul(m.mul(weights, m.sub(grad_weights, rows)), factor)
    dtype = query.dtype or torch.float32
    return (
        _matmul(m, grad_scores, key).as_type(dtype),
        _sum_over_groups(m, _matmul(m, _transposed(grad_scores), query), keys).as_type(dtype),
        _sum_over_groups(m, grad_value, values).as_type(dtype),
    )


@rule(aten.scaled_dot_product_attention)
def _attention(
    m: Arithmetic,
    op: Any,
    query: Dual,
    key: Dual,
    value: Dual,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if dropout_p:
        return NotImplemented
    if enable_gqa:
        key, value = _expand_kv_heads(query, key), _expand_kv_heads(query, value)
    scores, _ = _scores(m, query, key, is_causal, attn_mask, scale)
    return _matmul(m, _softmax(m, scores)[0], value).as_type(query.dtype or torch.float32)
