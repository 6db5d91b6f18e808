"""Programs, each with a correct and a wrong rewrite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["REWRITES", "Program", "Rewriting"]

Program = Callable[..., Any]


@dataclass(frozen=True)
class Rewriting:
    """A program with a correct and a wrong rewrite.

    Attributes:
        before: the program.
        right: another program that computes the same function.
        wrong: a program that computes another function.
        inputs: makes the inputs; floating-point ones are converted to the requested dtype.
        gradients: whether to differentiate it.
        state: positions of inputs that need no gradient.
    """

    before: Program
    right: Program
    wrong: Program
    inputs: Callable[[], tuple[Any, ...]]
    gradients: bool = True
    state: tuple[int, ...] = ()


def _floats(*shapes: Sequence[int]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.randn(*shape) for shape in shapes)


def _with_ids(high: int, count: Sequence[int], *shapes: Sequence[int]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(0, high, tuple(count)), *(torch.randn(*shape) for shape in shapes))


def _rotated(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def _angles(x: Tensor) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[-2], dtype=torch.float32)[:, None] * frequencies
    return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def _rope(x: Tensor) -> Tensor:
    cos, sin = (torch.cat([v, v], -1) for v in _angles(x))
    return x * cos + _rotated(x) * sin


def _rope_by_halves(x: Tensor, sign: float = 1.0) -> Tensor:
    cos, sin = _angles(x)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + sign * a * sin], -1)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, fill: float = float("-inf"), by: float = 2.0
) -> Tensor:
    scores = (q @ k.mT / by).masked_fill(~mask, fill)
    return scores.softmax(-1) @ v


def _heads() -> tuple[Tensor, ...]:
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    return (*(torch.randn(2, 3, 5, 4) for _ in range(3)), mask)


def _routed(x: Tensor, gate: Tensor, experts: Tensor, normalize: bool = True) -> Tensor:
    weights, chosen = (x @ gate).softmax(-1).topk(2, -1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    every = torch.einsum("td,edh->teh", x, experts)
    taken = every.gather(1, chosen.unsqueeze(-1).expand(-1, -1, every.shape[-1]))
    return (weights.unsqueeze(-1) * taken).sum(1)


def _routed_by_slot(x: Tensor, gate: Tensor, experts: Tensor, second: int = 1) -> Tensor:
    weights, chosen = (x @ gate).softmax(-1).topk(2, -1)
    every = torch.einsum("td,edh->teh", x, experts)

    def one(slot: int) -> Tensor:
        at = chosen[:, slot, None, None].expand(-1, 1, every.shape[-1])
        return weights[:, slot, None] * every.gather(1, at)[:, 0]

    return (one(0) + one(second)) / weights.sum(-1, keepdim=True)


def _smoothed(labels: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(x, labels, label_smoothing=0.1, ignore_index=2)


def _smoothed_by_hand(labels: Tensor, x: Tensor, counted: bool = True) -> Tensor:
    logs = x.log_softmax(-1)
    kept = labels != 2
    each = 0.9 * -logs.gather(1, labels[:, None])[:, 0] - 0.1 * logs.mean(-1)
    each = torch.where(kept, each, 0.0)
    return each.sum() / (kept.sum() if counted else labels.shape[0])


def _labels() -> tuple[Tensor, ...]:
    return torch.tensor([0, 2, 4, 1, 2, 3]), torch.randn(6, 5)


def _complex_product(x: Tensor, y: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(y))


def _real_product(x: Tensor, y: Tensor, sign: float = -1.0) -> Tensor:
    a, b, c, d = x[..., 0], x[..., 1], y[..., 0], y[..., 1]
    return torch.stack([a * c + sign * b * d, a * d + b * c], -1)


def _running(x: Tensor, state: Tensor, order: bool = True) -> Tensor:
    if order:
        state.mul_(0.9).add_(x.detach().mean(0) * 0.1)
        return x - state
    result = x - state
    state.mul_(0.9).add_(x.detach().mean(0) * 0.1)
    return result


def _running_at_once(x: Tensor, state: Tensor) -> Tensor:
    new = state * 0.9 + x.detach().mean(0) * 0.1
    state.copy_(new)
    return x - new


def _put(values: Tensor, accumulate: bool = True) -> Tensor:
    at = torch.tensor([0, 2, 2, 1, 0])
    return torch.zeros(4, values.shape[1], dtype=values.dtype).index_put((at,), values, accumulate=accumulate)


def _put_by_scatter(values: Tensor) -> Tensor:
    at = torch.tensor([0, 2, 2, 1, 0])[:, None].expand(-1, values.shape[1])
    return torch.zeros(4, values.shape[1], dtype=values.dtype).scatter_add(0, at, values)


def _groups(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.group_norm(x, 2, w, b)


def _groups_by_hand(x: Tensor, w: Tensor, b: Tensor, correction: int = 0) -> Tensor:
    grouped = x.float().view(x.shape[0], 2, -1)
    variance, mean = torch.var_mean(grouped, -1, correction=correction, keepdim=True)
    normal = ((grouped - mean) * (variance + 1e-5).rsqrt()).view(x.shape)
    return (normal * w[:, None, None] + b[:, None, None]).to(x.dtype)


def _batches(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, w, b, training=True)


def _batches_by_hand(x: Tensor, w: Tensor, b: Tensor, dims: Sequence[int] = (0, 2, 3)) -> Tensor:
    wide = x.float()
    variance, mean = torch.var_mean(wide, dims, correction=0, keepdim=True)
    factor = (variance + 1e-5).rsqrt() * w.view(1, -1, 1, 1)
    return ((wide - mean) * factor + b.view(1, -1, 1, 1)).to(x.dtype)


def _unsigned(x: Tensor, count: int = 4) -> Tensor:
    return (x >> 2) * count + (x & 3)


def _integers() -> tuple[Tensor, ...]:
    return (torch.randint(-100, 100, (4, 6)), torch.randn(4, 6))


_CONV = _floats((2, 4, 6, 6), (6, 4, 3, 3))

REWRITES: dict[str, Rewriting] = {
    "einsum as a matmul": Rewriting(
        lambda x, y: torch.einsum("bij,bkj->bik", x, y),
        lambda x, y: x @ y.mT,
        lambda x, y: x.mT @ y if x.shape[1] == y.shape[2] else x @ y,
        _floats((2, 4, 4), (2, 4, 4)),
    ),
    "einsum in another order": Rewriting(
        lambda x, y, z: torch.einsum("ij,jk,kl->il", x, y, z),
        lambda x, y, z: x @ (y @ z),
        lambda x, y, z: x @ (z @ y),
        _floats((3, 4), (4, 4), (4, 4)),
    ),
    "index_put with repeats": Rewriting(_put, _put_by_scatter, lambda v: _put(v, False), _floats((5, 3))),
    "rows added up by masks": Rewriting(
        lambda ids, v: torch.zeros(6, 3, dtype=v.dtype).index_add(0, ids, v),
        lambda ids, v: torch.stack([torch.where((ids % 6 == i)[:, None], v, 0.0).sum(0) for i in range(6)]),
        lambda ids, v: ((F.one_hot(ids, 6).cumsum(0) == 1).to(v.dtype).T.float() @ v.float()).to(v.dtype),
        _with_ids(6, (9,), (9, 3)),
    ),
    "cumsum in two parts": Rewriting(
        lambda x: x.cumsum(-1),
        lambda x: torch.cat([x[:, :3].cumsum(-1), x[:, 3:].cumsum(-1) + x[:, :3].sum(-1, True)], -1),
        lambda x: torch.cat([x[:, :3].cumsum(-1), x[:, 3:].cumsum(-1) + x[:, :2].sum(-1, True)], -1),
        _floats((4, 6)),
    ),
    "cumsum from behind": Rewriting(
        lambda x: x.flip(-1).cumsum(-1).flip(-1),
        lambda x: torch.stack([x[:, i:].sum(-1) for i in range(6)], -1),
        lambda x: x.sum(-1, keepdim=True) - x.cumsum(-1),
        _floats((4, 6)),
    ),
    "sort as topk": Rewriting(
        lambda x: x.sort(-1, descending=True).values[..., :3],
        lambda x: x.topk(3, -1).values,
        lambda x: x.topk(3, -1, largest=False).values,
        _floats((4, 6)),
        gradients=False,
    ),
    "largest as sort": Rewriting(
        lambda x: x.amax(-1) - x.amin(-1),
        lambda x: x.sort(-1).values[..., -1] - x.sort(-1).values[..., 0],
        lambda x: x.sort(-1).values[..., -1] - x.sort(-1).values[..., 1],
        _floats((4, 6)),
        gradients=False,  # the two pass gradients of ties to other elements
    ),
    "ranks by counting": Rewriting(
        lambda x: x.sort(dim=-1, stable=True).indices.sort(dim=-1, stable=True).indices,
        lambda x: (
            (x[..., None, :] < x[..., :, None])
            | ((x[..., None, :] == x[..., :, None]) & torch.ones(6, 6, dtype=torch.bool).tril(-1))
        ).sum(-1),
        lambda x: (x[..., None, :] <= x[..., :, None]).sum(-1) - 1,
        _floats((4, 6)),
        gradients=False,
    ),
    "convolution of size one": Rewriting(
        lambda x, w: F.conv2d(x, w),
        lambda x, w: (
            (x.flatten(2).mT @ w[:, :, 0, 0].T).mT.reshape(x.shape[0], -1, *x.shape[2:]).contiguous()
        ),
        lambda x, w: (x.flatten(2).mT @ w[:, :, 0, 0]).mT.reshape(x.shape[0], -1, *x.shape[2:]),
        _floats((2, 4, 3, 3), (4, 4, 1, 1)),
    ),
    "convolution by unfolding": Rewriting(
        lambda x, w: F.conv2d(x, w, padding=1),
        lambda x, w: (w.flatten(1) @ F.unfold(x, 3, padding=1)).view(x.shape[0], -1, *x.shape[2:]),
        lambda x, w: (w.flip(-1).flatten(1) @ F.unfold(x, 3, padding=1)).view(x.shape[0], -1, *x.shape[2:]),
        _CONV,
    ),
    "convolutions of halves": Rewriting(
        lambda x, w: F.conv2d(x, w, stride=2),
        lambda x, w: torch.cat([F.conv2d(x, w[:3], stride=2), F.conv2d(x, w[3:], stride=2)], 1),
        lambda x, w: torch.cat([F.conv2d(x, w[3:], stride=2), F.conv2d(x, w[:3], stride=2)], 1),
        _CONV,
    ),
    "grouped convolution": Rewriting(
        lambda x, w: F.conv2d(x, w, groups=2),
        lambda x, w: torch.cat([F.conv2d(x[:, :2], w[:3]), F.conv2d(x[:, 2:], w[3:])], 1),
        lambda x, w: torch.cat([F.conv2d(x[:, 2:], w[:3]), F.conv2d(x[:, :2], w[3:])], 1),
        _floats((2, 4, 5, 5), (6, 2, 3, 3)),
    ),
    "pooling by views": Rewriting(
        lambda x: F.avg_pool2d(x, 2),
        lambda x: x.unflatten(2, (-1, 2)).unflatten(-1, (-1, 2)).mean((3, 5)),
        lambda x: x.unflatten(2, (-1, 2)).unflatten(-1, (-1, 2)).amax((3, 5)),
        _floats((2, 4, 6, 6)),
    ),
    "pooling to one": Rewriting(
        lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1),
        lambda x: x.mean((2, 3)),
        lambda x: x.sum((2, 3)) / 35,
        _floats((2, 4, 6, 6)),
    ),
    "pooling without padding": Rewriting(
        lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
        lambda x: F.avg_pool2d(x, 3, 1, 1) / F.avg_pool2d(torch.ones_like(x), 3, 1, 1),
        lambda x: F.avg_pool2d(x, 3, 1, 1),
        _floats((2, 4, 6, 6)),
    ),
    "largest of windows": Rewriting(
        lambda x: F.max_pool2d(x, 2),
        lambda x: x.unfold(2, 2, 2).unfold(3, 2, 2).flatten(-2).max(-1).values,
        lambda x: x.unfold(2, 2, 2).unfold(3, 2, 2)[..., 0].max(-1).values,
        _floats((2, 4, 6, 6)),
        gradients=False,
    ),
    "embedding bag": Rewriting(
        lambda ids, w: F.embedding_bag(ids, w, mode="mean"),
        lambda ids, w: F.embedding(ids, w).mean(1),
        lambda ids, w: F.embedding(ids, w).sum(1),
        _with_ids(7, (4, 3), (7, 5)),
    ),
    "embedding with padding": Rewriting(
        lambda ids, w: F.embedding(ids, w, padding_idx=0),
        lambda ids, w: torch.where((ids == 0)[..., None], w.detach()[ids], w[ids]),
        lambda ids, w: F.embedding(ids, w),
        _with_ids(3, (4, 5), (7, 5)),
    ),
    "layer norm by moments": Rewriting(
        lambda x, w, b: F.layer_norm(x, (6,), w, b),
        lambda x, w, b: (
            (x.float() - x.float().mean(-1, True))
            * (x.float().var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
            * w
            + b
        ).to(x.dtype),
        lambda x, w, b: (
            (x.float() - x.float().mean(-1, True)) * (x.float().var(-1, keepdim=True) + 1e-5).rsqrt() * w + b
        ).to(x.dtype),
        _floats((4, 6), (6,), (6,)),
    ),
    "group norm": Rewriting(
        _groups,
        _groups_by_hand,
        lambda x, w, b: _groups_by_hand(x, w, b, 1),
        _floats((2, 4, 3, 3), (4,), (4,)),
    ),
    "batch norm": Rewriting(
        _batches,
        _batches_by_hand,
        lambda x, w, b: _batches_by_hand(x, w, b, (2, 3)),
        _floats((3, 4, 3, 3), (4,), (4,)),
    ),
    "attention with a mask": Rewriting(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        _attention,
        lambda q, k, v, m: _attention(q, k, v, m.logical_not().logical_not(), by=4.0),
        _heads,
    ),
    "attention with a mask added": Rewriting(
        _attention,
        lambda q, k, v, m: (q @ k.mT / 2 + 0).where(m, float("-inf")).softmax(-1) @ v,
        lambda q, k, v, m: (q @ k.mT / 2 * m).softmax(-1) @ v,
        _heads,
    ),
    "attention by the exponential": Rewriting(
        lambda q, k, v: (q @ k.mT).softmax(-1) @ v,
        lambda q, k, v: ((p := ((s := q @ k.mT) - s.amax(-1, True).detach()).exp()) @ v) / p.sum(-1, True),
        lambda q, k, v: (
            ((p := ((s := q @ k.mT) - s.amax(-1, True).detach()).exp()) @ v) / p.sum(-2).unsqueeze(-1)
        ),
        _floats((2, 5, 4), (2, 5, 4), (2, 5, 4)),
        gradients=False,  # divides late, and loses gradients where the softmax is saturated
    ),
    "grouped heads": Rewriting(
        lambda q, k: q @ k.repeat_interleave(2, 1).mT,
        lambda q, k: (q.unflatten(1, (2, 2)) @ k.unsqueeze(2).mT).flatten(1, 2),
        lambda q, k: q @ k.repeat(1, 2, 1, 1).mT,
        _floats((2, 4, 5, 3), (2, 2, 5, 3)),
    ),
    "rotary positions": Rewriting(
        _rope, _rope_by_halves, lambda x: _rope_by_halves(x, -1.0), _floats((2, 3, 5, 8))
    ),
    "experts by slot": Rewriting(
        _routed,
        _routed_by_slot,
        lambda x, g, e: _routed_by_slot(x, g, e, 0),
        _floats((6, 4), (4, 3), (3, 4, 5)),
    ),
    "experts normalized": Rewriting(
        _routed,
        lambda x, g, e: _routed(x, g, e) * 1.0,
        lambda x, g, e: _routed(x, g, e, False),
        _floats((6, 4), (4, 3), (3, 4, 5)),
    ),
    "cross entropy, smoothed": Rewriting(
        _smoothed, _smoothed_by_hand, lambda labels, x: _smoothed_by_hand(labels, x, False), _labels
    ),
    "dropout": Rewriting(
        lambda x: F.dropout(x, 0.3) * 2,
        lambda x: 2 * F.dropout(x, 0.3),
        lambda x: F.dropout(x, 0.4) * 2,
        _floats((6, 8)),
    ),
    "dropout before a sum": Rewriting(
        lambda x, y: F.dropout(x, 0.5) + F.dropout(y, 0.5),
        lambda x, y: F.dropout(x, 0.5).add(F.dropout(y, 0.5)),
        lambda x, y: F.dropout(y, 0.5) + F.dropout(x, 0.5),
        _floats((6, 8), (6, 8)),
    ),
    "complex product": Rewriting(
        _complex_product, _real_product, lambda x, y: _real_product(x, y, 1.0), _floats((3, 4, 2), (3, 4, 2))
    ),
    "integers by shifts": Rewriting(
        lambda x, y: (x // 4 * 4 + x % 4) * y.detach().round().long(),
        lambda x, y: _unsigned(x) * y.detach().round().long(),
        lambda x, y: (torch.div(x, 4, rounding_mode="trunc") * 4 + x % 4) * y.detach().round().long(),
        _integers,
        gradients=False,
    ),
    "flags as integers": Rewriting(
        lambda x: (x > 0).long().sum(-1) > 2,
        lambda x: torch.where(x > 0, 1, 0).sum(-1) >= 3,
        lambda x: (x >= 0).long().sum(-1) > 2,
        _floats((4, 6)),
        gradients=False,
    ),
    "a state in place": Rewriting(
        _running, _running_at_once, lambda x, s: _running(x, s, False), _floats((4, 6), (6,)), state=(1,)
    ),
    "in place on a view": Rewriting(
        lambda x: (y := x * 2, y[:, 1:].mul_(3))[0].sum(-1),
        lambda x: torch.cat([x[:, :1] * 2, x[:, 1:] * 6], -1).sum(-1),
        lambda x: torch.cat([x[:, :2] * 2, x[:, 2:] * 6], -1).sum(-1),
        _floats((4, 6)),
    ),
    "log-softmax in parts": Rewriting(
        lambda x: x.log_softmax(-1),
        lambda x: (
            x
            - torch.cat([x[:, :3].logsumexp(-1, True), x[:, 3:].logsumexp(-1, True)], -1).logsumexp(-1, True)
        ),
        lambda x: (
            x
            - torch.cat([x[:, :3].logsumexp(-1, True), x[:, 4:].logsumexp(-1, True)], -1).logsumexp(-1, True)
        ),
        _floats((4, 6)),
    ),
    "silu and its gate": Rewriting(
        lambda x, y: F.silu(x) * y,
        lambda x, y: x * y * x.sigmoid(),
        lambda x, y: x * y.sigmoid() * y,
        _floats((4, 6), (4, 6)),
    ),
    "softplus": Rewriting(
        lambda x: F.softplus(x),
        lambda x: torch.logaddexp(x, torch.zeros_like(x)),
        lambda x: torch.logaddexp(x, torch.ones_like(x)),
        _floats((4, 6)),
        gradients=False,  # beyond its threshold of 20, it is the identity
    ),
    "variance of rows": Rewriting(
        lambda x: x.var(-1),
        lambda x: (x - x.mean(-1, True)).square().sum(-1) / (x.shape[-1] - 1),
        lambda x: (x - x.mean(-1, True)).square().sum(-1) / x.shape[-1],
        _floats((4, 6)),
    ),
    "distances by products": Rewriting(
        lambda x, y: (x[:, None] - y[None]).square().sum(-1),
        lambda x, y: x.square().sum(-1)[:, None] + y.square().sum(-1)[None] + x @ y.T * -2,
        lambda x, y: x.square().sum(-1)[:, None] + y.square().sum(-1)[None] - x @ y.T,
        _floats((4, 6), (5, 6)),
    ),
    "transposed kernel": Rewriting(
        lambda x, w: F.conv_transpose2d(x, w, stride=2),
        lambda x, w: torch.cat(
            [F.conv_transpose2d(x, w[:, :2], stride=2), F.conv_transpose2d(x, w[:, 2:], stride=2)], 1
        ),
        lambda x, w: F.conv_transpose2d(x, w.flip(-1), stride=2),
        _floats((2, 4, 3, 3), (4, 3, 2, 2)),
    ),
    "clamp as relu": Rewriting(
        lambda x: x.clamp(0, 6),
        lambda x: torch.minimum(x.relu(), torch.tensor(6.0, dtype=x.dtype)),
        lambda x: 6 - (6 - x.relu()).relu(),
        _floats((4, 6)),
        gradients=False,
    ),
    "padding by cat": Rewriting(
        lambda x: F.pad(x.sin(), (1, 2), value=0.5),
        lambda x: torch.cat([x.new_full((4, 1), 0.5), x.sin(), x.new_full((4, 2), 0.5)], -1),
        lambda x: torch.cat([x.new_full((4, 2), 0.5), x.sin(), x.new_full((4, 1), 0.5)], -1),
        _floats((4, 6)),
    ),
}
