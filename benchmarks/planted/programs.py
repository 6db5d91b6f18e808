"""Programs for the plants: small functions and models, some from the zoo and from transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._transformers import build
from benchmarks.planted.plant import Workload
from tests.models.zoo import ZOO


def zoo(name: str, size: int = 2, dtype: torch.dtype = torch.float32) -> Workload:
    """A model of the zoo."""

    def made() -> tuple[nn.Module, Sequence[Any]]:
        entry = ZOO[name]
        inputs = [
            v.to(dtype).detach().requires_grad_(v.requires_grad)
            if isinstance(v, Tensor) and v.is_floating_point()
            else v
            for v in entry.inputs(size)
        ]
        return entry.build().to(dtype), inputs

    return made


def hub(name: str, dtype: torch.dtype = torch.float32, training: bool = False, **how: Any) -> Workload:
    """A model of transformers."""

    def made() -> tuple[nn.Module, Sequence[Any]]:
        built = build(name, training=training, **how)
        return built.model.to(dtype), built.inputs

    return made


def function(f: Any, *shapes: Sequence[int], dtype: torch.dtype = torch.float32) -> Workload:
    """A function of random tensors that require gradients."""
    return lambda: (f, [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes])


class Mlp(nn.Module):
    """A sequence of layers, each with a norm."""

    def __init__(self, layers: int = 4, width: int = 16, activation: Any = F.gelu) -> None:
        super().__init__()
        self.activation = activation
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + self.activation(layer(norm(x)))
        return x


def mlp(
    layers: int = 4, rows: int = 6, dtype: torch.dtype = torch.float32, activation: Any = F.gelu
) -> Workload:
    """Build an :class:`Mlp` and an input."""
    return lambda: (
        Mlp(layers, activation=activation).to(dtype),
        [torch.randn(rows, 16, dtype=dtype, requires_grad=True)],
    )


class Attention(nn.Module):
    """Attention written out, with a causal mask, a softmax in float32, and dropout."""

    def __init__(self, width: int = 16, heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5
        causal = torch.ones(time, time, dtype=torch.bool).tril()
        weights = scores.masked_fill(~causal, float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype)
        weights = F.dropout(weights, self.dropout, self.training)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, time, width))


def attention(dtype: torch.dtype = torch.float32, dropout: float = 0.0, time: int = 7) -> Workload:
    """Build an :class:`Attention` and an input."""
    return lambda: (
        Attention(dropout=dropout).to(dtype),
        [torch.randn(2, time, 16, dtype=dtype, requires_grad=True)],
    )


def forty(x: Tensor) -> Tensor:
    """The same expression forty times, each with another constant."""
    total = x
    for k in range(40):
        total = total + (x + k).neg().neg().sin()
    return total


def forty_twice(x: Tensor) -> Tensor:
    """Forty products, each with its own factor."""
    total = x
    for k in range(40):
        total = total + (x * (k + 2)).sin() / 40
    return total


def forty_tanh(x: Tensor) -> Tensor:
    """Forty times a function whose gradient uses its result."""
    total = x
    for k in range(40):
        total = total + (x + k / 40).tanh()
    return total


def dropout_twice(x: Tensor) -> Tensor:
    """Two independent masks."""
    return F.dropout(x.sin(), 0.3) + F.dropout(x.cos(), 0.3)


def noisy(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two draws that both matter."""
    return x * torch.rand(4), x + torch.rand(4)


def drawn_unused(x: Tensor) -> Tensor:
    """A partly used draw before another one."""
    first = torch.randn(8)
    return x * first[:4] + torch.randn(4)


def scattered(x: Tensor, index: Tensor) -> Tensor:
    """Rows put into a table of zeros."""
    return torch.zeros(6, 3).index_put((index,), x.sin()) * 2


def copied(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a copy of an input."""
    return x.clone(), x.sin()


def viewed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a view of an input."""
    return x.t(), x.sin()


def updated(x: Tensor, state: Tensor) -> Tensor:
    """Reads, updates and rereads a buffer."""
    before = state * 2
    state.add_(x.detach().sum())
    return x * state + before


def two_updates(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Updates two buffers."""
    a.mul_(0.9).add_(x.detach() * 0.1)
    b.mul_(0.5).add_(x.detach() * 0.5)
    return x * a - b


def branches(x: Tensor) -> Tensor:
    """A conditional with subgraphs."""
    return torch.cond(x.sum() > 0, lambda y: (y.sin() + 1,), lambda y: (y.sin() - 1,), (x * 2,))[0]


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two results of the same shape."""
    return x.sin() * 2, x.cos() * 2


def detached(x: Tensor, w: Tensor) -> Tensor:
    """Detaches a part of the gradient."""
    return (x * w).sin() * (x * w).cos().detach()


def with_penalty(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Two losses of different weight."""
    return (x @ w).tanh().sum(), (w * w).sum()


def saturated(x: Tensor) -> Tensor:
    """Limits that are rarely reached."""
    return F.relu6(x * 1.5) + F.hardtanh(x, -3, 3)


def pooled(x: Tensor) -> Tensor:
    """The mean of all rows, without the padding."""
    return (x.sin() / x.shape[0]).sum(0) + x.mean(0)


def windows(x: Tensor) -> Tensor:
    """The sum over rows, times the input."""
    return x.cos().sum(0, keepdim=True) * x


def halves_of(x: Tensor) -> Tensor:
    """Uses an input twice."""
    y = x * 2
    return y.sin() + x


def reused(x: Tensor) -> Tensor:
    """Uses a value before and after another one is computed from it."""
    y = x.sin()
    z = y + x
    return z * y.cos()
