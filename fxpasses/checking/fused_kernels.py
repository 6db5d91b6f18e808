"""What fused attention kernels stand for: their definition, which they round in their own way.

A kernel takes its gradients from what it saved: ``exp(scores - logsumexp)``, and a difference of two sums of products, of results that were rounded. With scores
of thousands no digit may be left of that, and infinities may come of it, where the definition has numbers. That is torch's matter, and not that of a pass.
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
_UNITS = 64.0
"""Of float32, or of the result's own type: what a kernel saved for its gradients is what the definition gives, but for so many."""
_GROUPED = {op.default for op in named("_grouped_mm")}
Rounding = Callable[[Tensor], Tensor]


def has_kernels(gm: fx.GraphModule) -> bool:
    """Whether a graph calls a fused kernel whose definition is known."""
    return any(node.target in _FORWARD | _BACKWARD for node in gm.graph.nodes)


def in_float64(target: Any, args: Sequence[Any]) -> Tensor | None:
    """The result of a call that has kernels for few types alone, of float64; ``None`` for any other."""
    if target not in _GROUPED or any(isinstance(value, Tensor) for value in args[3:]):
        return None
    return grouped_matmul(args[0], args[1], args[2] if len(args) > 2 else None)


def as_defined(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    result: Any,
    rounded: Rounding = lambda step: step,
) -> Any:
    """The result of a call, in its own memory; that of a fused kernel is what its definition gives in float64, rounded to its type.

    Args:
        target: what was called.
        args: with which arguments.
        kwargs: and keyword arguments.
        result: what it gave, which is written to.
        rounded: is shown each step of the definition, and gives what goes on.
    """
    if target in _FORWARD:
        found: tuple[Tensor, ...] | None = _attention(*args, **kwargs, rounded=rounded)
    elif target in _BACKWARD:
        found = _gradients(*args, **kwargs, rounded=rounded)
    else:
        return result
    for place, value in zip(result, found if found is not None else (), strict=False):
        place.copy_(
            torch.where(value.isfinite(), value, place)
        )  # masked keys are skipped, whatever they hold
    return result


def _wide(value: Tensor, like: Tensor) -> Tensor:
    """A tensor in float64, keys and values once for each head of the queries: heads may share them in groups."""
    groups = like.shape[1] // value.shape[1]
    return value.double().repeat_interleave(groups, 1)


def _scores(
    query: Tensor, key: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None, rounded: Rounding
) -> tuple[Tensor, float]:
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = rounded(query.double() @ _wide(key, query).mT * factor)
    if is_causal:
        kept = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~kept, -math.inf)
    return (scores if mask is None else rounded(scores + mask.double())), factor


def _weights(scores: Tensor, rounded: Rounding) -> tuple[Tensor, Tensor]:
    """The softmax, and the logarithm of what it divides by. A row that is masked as a whole has weights zero."""
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
    return rounded(weights @ _wide(value, query)), total


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
    values, wide = _wide(value, query), grad.double()
    of_weights = rounded(wide @ values.mT)
    # What was saved is what the definition gives, but for rounding; else it is what it is, and another function.
    is_near = (total - logsumexp).abs() <= _error(scores, torch.float32).amax(-1)
    saved = (scores - logsumexp.double()[..., None]).exp()
    weights = torch.where(is_near[..., None], weights, saved)
    defined = weights @ values
    is_out = ((defined - out).abs() <= _error(values, out.dtype).amax(-2, keepdim=True)).all(-1)
    rows = torch.where(is_out, (of_weights * weights).sum(-1), (wide * out).sum(-1))
    of_scores = rounded(weights * (of_weights - rows[..., None]) * factor)
    groups = query.shape[1] // key.shape[1]

    def over_groups(gradient: Tensor) -> Tensor:
        return gradient if groups == 1 else gradient.unflatten(1, (-1, groups)).sum(2)

    return (
        of_scores @ _wide(key, query),
        over_groups(of_scores.mT @ query.double()),
        over_groups(weights.mT @ wide),
    )


def _error(value: Tensor, dtype: torch.dtype) -> Tensor:
    """What a few units in the last place of a value are."""
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return _UNITS * eps * value.abs().nan_to_num(0.0, 0.0, 0.0).clamp(min=1e-30)
