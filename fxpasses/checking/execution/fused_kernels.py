"""What fused attention kernels stand for: their definition, which they round in their own way.

A kernel computes gradients from saved values: ``exp(scores - logsumexp)``, and a difference of two sums of
products of rounded results. With scores in the thousands that may lose all digits, or give infinities where
the definition is finite. That is PyTorch's responsibility, not that of a pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.exact.rules.matmul import grouped_matmul
from fxpasses.exact.rules.table import named

_FORWARD = {op.default for op in named("_scaled_dot_product_flash_attention_for_cpu")}
_BACKWARD = {op.default for op in named("_scaled_dot_product_flash_attention_for_cpu_backward")}
_MAX_ULPS = 64.0
"""Tolerance in ulps of float32, or of the result's own dtype, for saved values to match the definition."""
_GROUPED = {op.default for op in named("_grouped_mm")}
Rounding = Callable[[Tensor], Tensor]


def has_kernels(gm: fx.GraphModule) -> bool:
    """Whether a graph calls a fused kernel with a known definition."""
    return any(node.target in _FORWARD | _BACKWARD for node in gm.graph.nodes)


def compute_in_float64(target: Any, args: Sequence[Any]) -> Tensor | None:
    """Compute a call in float64 whose kernels exist for few dtypes only; ``None`` for any other call."""
    if target not in _GROUPED or any(isinstance(value, Tensor) for value in args[3:]):
        return None
    return grouped_matmul(args[0], args[1], args[2] if len(args) > 2 else None)


def recompute_by_definition(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any,
    rounded: Rounding = lambda step: step,
) -> Any:
    """Return the result of a call; for a fused kernel, overwrite it with its definition in float64, rounded.

    Args:
        target: the callee.
        args: its arguments.
        kwargs: its keyword arguments.
        result: its result, which is written to.
        rounded: maps each step of the definition to the value to continue with.
    """
    if target in _FORWARD:
        found: tuple[Tensor, ...] | None = _attention(*args, **kwargs, rounded=rounded)
    elif target in _BACKWARD:
        found = _gradients(*args, **kwargs, rounded=rounded)
    else:
        return result
    for output, value in zip(result, found if found is not None else (), strict=False):
        output.copy_(
            torch.where(value.isfinite(), value, output)
        )  # kernels skip masked keys, whatever they hold
    return result


def _expand_heads(value: Tensor, like: Tensor) -> Tensor:
    """A tensor in float64, with keys and values repeated per query head: groups of heads may share them."""
    groups = like.shape[1] // value.shape[1]
    return value.double().repeat_interleave(groups, 1)


def _scores(
    query: Tensor, key: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None, rounded: Rounding
) -> tuple[Tensor, float]:
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = rounded(query.double() @ _expand_heads(key, query).mT * factor)
    if is_causal:
        kept = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~kept, -math.inf)
    return (scores if mask is None else rounded(scores + mask.double())), factor


def _weights(scores: Tensor, rounded: Rounding) -> tuple[Tensor, Tensor]:
    """The softmax, and its log-sum-exp. A fully masked row has weights zero."""
    masked = (scores == -math.inf).all(-1, keepdim=True)
    total = scores.logsumexp(-1).masked_fill(masked.squeeze(-1), 0.0)
    return rounded(scores.softmax(-1).masked_fill(masked, 0.0)), total


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    rounded: Rounding,
) -> tuple[Tensor, Tensor] | None:
    if dropout_p:
        return None
    scores, _ = _scores(query, key, is_causal, attn_mask, scale, rounded)
    weights, total = _weights(scores, rounded)
    return rounded(weights @ _expand_heads(value, query)), total


def _gradients(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    rounded: Rounding,
) -> tuple[Tensor, Tensor, Tensor] | None:
    if dropout_p:
        return None
    scores, factor = _scores(query, key, is_causal, attn_mask, scale, rounded)
    weights, total = _weights(scores, rounded)
    values, wide = _expand_heads(value, query), grad.double()
    grad_weights = rounded(wide @ values.mT)
    # If a saved value is not the definition's, except for rounding, it is used as it is: another function.
    is_near = (total - logsumexp).abs() <= _tolerance(scores, torch.float32).amax(-1)
    saved = (scores - logsumexp.double()[..., None]).exp()
    weights = torch.where(is_near[..., None], weights, saved)
    defined = weights @ values
    is_out = ((defined - out).abs() <= _tolerance(values, out.dtype).amax(-2, keepdim=True)).all(-1)
    rows = torch.where(is_out, (grad_weights * weights).sum(-1), (wide * out).sum(-1))
    grad_scores = rounded(weights * (grad_weights - rows[..., None]) * factor)
    groups = query.shape[1] // key.shape[1]

    def over_groups(gradient: Tensor) -> Tensor:
        return gradient if groups == 1 else gradient.unflatten(1, (-1, groups)).sum(2)

    return (
        grad_scores @ _expand_heads(key, query),
        over_groups(grad_scores.mT @ query.double()),
        over_groups(weights.mT @ wide),
    )


def _tolerance(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The tolerance of a few units in the last place of a value."""
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return _MAX_ULPS * eps * value.abs().nan_to_num(0.0, 0.0, 0.0).clamp(min=1e-30)
