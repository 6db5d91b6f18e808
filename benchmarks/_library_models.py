"""Small models on which each library pass is measured, with the pattern that the pass rewrites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxpasses.demo.gpt import GPT


@dataclass(frozen=True)
class Case:
    """A model and its inputs.

    Attributes:
        training: whether a step is a training step.
        partner: a pass that runs last, both with and without the measured pass.
        options: additional backend options, with and without the pass.
    """

    description: str
    build: Callable[[], tuple[Callable[..., Tensor], tuple[Tensor, ...]]]
    training: bool = True
    partner: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


def fuse_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention written out, without a fused kernel."""
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v


class OneHotFeatures(nn.Module):
    """Categorical features as one-hot rows into a linear layer, as in tabular models."""

    def __init__(self, classes: int = 2000, width: int = 128) -> None:
        super().__init__()
        self.classes = classes
        self.layers = nn.Sequential(nn.Linear(classes, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, index: Tensor) -> Tensor:
        return self.layers(F.one_hot(index, self.classes).to(self.layers[0].weight.dtype))


class GroupedQueryLayer(nn.Module):
    """Self-attention with 4 query heads per key head, with or without a KV cache."""

    def __init__(self, width: int = 512, heads: int = 16, key_heads: int = 4) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = heads, key_heads, width // heads
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key, self.value = (nn.Linear(width, key_heads * self.size) for _ in range(2))

    def forward(self, x: Tensor, keys: Tensor | None = None, values: Tensor | None = None) -> Tensor:
        batch, time, width = x.shape
        q = self.query(x).view(batch, time, self.heads, self.size).transpose(1, 2)
        k = self.key(x).view(batch, time, self.key_heads, self.size).transpose(1, 2)
        v = self.value(x).view(batch, time, self.key_heads, self.size).transpose(1, 2)
        if keys is not None and values is not None:
            k, v = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        groups = self.heads // self.key_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=keys is None)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class LowRank(nn.Module):
    """Linear layers with frozen weights, each plus a low-rank update that is added as a matrix."""

    def __init__(self, width: int = 512, rank: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.down = nn.ParameterList(torch.randn(width, rank) * 0.02 for _ in range(layers))
        self.up = nn.ParameterList(torch.randn(rank, width) * 0.02 for _ in range(layers))
        self.base = nn.ModuleList(nn.Linear(width, width).requires_grad_(False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for down, up, base in zip(self.down, self.up, self.base, strict=True):
            x = F.gelu(base(x) + x @ (down @ up))
        return x


class LinearAttention(nn.Module):
    """Attention without softmax, but written in the order of softmax attention: scores first."""

    def __init__(self, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = (F.elu(q) + 1) @ (F.elu(k) + 1).transpose(-1, -2) @ v / time
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class NextToken(nn.Module):
    """A language model that returns the logits of the last position."""

    def __init__(self, layers: int = 2, width: int = 256, vocabulary: int = 8000) -> None:
        super().__init__()
        self.gpt = GPT(layers, width, 4, 256, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.gpt.token(tokens) + self.gpt.position(torch.arange(tokens.shape[1]))
        for block in self.gpt.blocks:
            x = block(x)
        return self.gpt.head(self.gpt.norm(x))[:, -1]


class FirstToken(nn.Module):
    """The blocks of a vision transformer, with a classifier on the first token."""

    def __init__(self, layers: int = 3, width: int = 192) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, 3, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)[:, 0])


class Pairs(nn.Module):
    """A relation network: a layer on every pair of objects."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2 * width, 128), nn.Linear(128, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, count, width = x.shape
        left = x[:, :, None].expand(batch, count, count, width)
        right = x[:, None].expand(batch, count, count, width)
        return self.second(F.relu(self.first(torch.cat([left, right], -1)))).sum((1, 2))


class Neck(nn.Module):
    """A 1x1 convolution of two images of different sizes, as in the necks of detectors."""

    def __init__(self, small: int = 128, large: int = 64) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(small + large, 64, 1, bias=False), nn.BatchNorm2d(64)

    def forward(self, small: Tensor, large: Tensor) -> Tensor:
        together = torch.cat([F.interpolate(small, scale_factor=2.0), large], 1)
        return F.silu(self.norm(self.layer(together)))


class Conditioned(nn.Module):
    """A field network: one condition vector is appended to every point."""

    def __init__(self, width: int = 128, condition: int = 256) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width + condition, 128), nn.Linear(128, 4)

    def forward(self, points: Tensor, condition: Tensor) -> Tensor:
        batch, count, _ = points.shape
        repeated = condition[:, None].expand(batch, count, condition.shape[1])
        return self.second(F.relu(self.first(torch.cat([points, repeated], -1))))


class LanguageLoss(nn.Module):
    """The output layer and loss of a language model."""

    def __init__(self, width: int = 128, vocabulary: int = 16000) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)), targets)


class Bottlenecks(nn.Module):
    """Bottleneck blocks of a residual network: a 3x3 convolution between two 1x1 convolutions."""

    def __init__(self, channels: int = 128, inner: int = 32) -> None:
        super().__init__()
        convolutions = lambda: (  # noqa: E731
            (nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
            (nn.Conv2d(inner, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()),
            (nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels)),
        )
        self.blocks = nn.ModuleList(
            nn.Sequential(*(layer for layers in convolutions() for layer in layers)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = (x + block(x)).relu()
        return x


class Dropped(nn.Module):
    """Transformer layers with dropout, trained."""

    def __init__(self, width: int = 256, dropout: float = 0.1, activation: str = "relu") -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width),
                nn.ReLU(),
                nn.Dropout(dropout),
                nn.Linear(4 * width, width),
                nn.Dropout(dropout),
            )
            for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))
        return x


class Residual(nn.Module):
    """Residual convolution blocks with batch norm."""

    def __init__(self, width: int = 32, blocks: int = 2) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2 * blocks)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2 * blocks))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(0, len(self.convs), 2):
            y = F.relu(self.norms[i](self.convs[i](x)))
            x = F.relu(x + self.norms[i + 1](self.convs[i + 1](y)))
        return x


class Unrolled(nn.Module):
    """A language model with unrolled recurrent layers and logits."""

    def __init__(self, width: int = 256, layers: int = 2, vocabulary: int = 2000) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.cells = nn.ModuleList(nn.GRUCell(width, width) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        states = [self.token.weight.new_zeros(len(tokens), cell.hidden_size) for cell in self.cells]
        logits = []
        for step in self.token(tokens).unbind(1):
            x = step
            for layer, cell in enumerate(self.cells):
                x = states[layer] = cell(x, states[layer])
            logits.append(self.head(x))
        return F.cross_entropy(torch.stack(logits, 1)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _unrolled() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Unrolled(), (_tokens(8, 12, high=2000),)


_WHOLE = {"regions": "off"}
"""Regions are off: a pass sees no sum over steps that are compiled once and called repeatedly."""


def _tokens(*shape: int, high: int = 256) -> Tensor:
    return torch.randint(high, shape)


CASES: dict[str, tuple[Case, ...]] = {
    "replace_one_hot_matmul": (
        Case("one-hot features, 256 x 2000", lambda: (OneHotFeatures(), (_tokens(256, high=2000),))),
    ),
    "remove_repeat_kv": (
        Case(
            "one token, 2048 in the cache",
            lambda: (
                GroupedQueryLayer(),
                (torch.randn(1, 1, 512), torch.randn(1, 4, 2048, 32), torch.randn(1, 4, 2048, 32)),
            ),
            training=False,
        ),
        Case("training, 2 x 256 tokens", lambda: (GroupedQueryLayer(), (torch.randn(2, 256, 512),))),
    ),
    "fuse_attention": (
        Case(
            "4 x 8 heads of 32, 512 tokens",
            lambda: (fuse_attention, tuple(torch.randn(4, 8, 512, 32) for _ in range(3))),
            training=False,
        ),
    ),
    "reassociate_matmuls": (
        Case("low-rank updates, 256 x 512", lambda: (LowRank(), (torch.randn(256, 512),))),
        Case("linear attention, 512 tokens", lambda: (LinearAttention(), (torch.randn(2, 512, 256),))),
    ),
    "pack_dropout_rng": (Case("two MLP blocks with dropout", lambda: (Dropped(), (torch.randn(512, 256),))),),
    "pack_saved_masks": (Case("two MLP blocks with dropout", lambda: (Dropped(), (torch.randn(512, 256),))),),
    "downcast_saved_activations": (
        Case(
            "GPT, 2 layers, 2 x 256 tokens", lambda: (GPT(2, 256, 4, 256), (_tokens(2, 256), _tokens(2, 256)))
        ),
        Case("residual convolutions", lambda: (Residual(), (torch.randn(4, 32, 32, 32),))),
    ),
    "move_matmul_before_broadcast": (
        Case("layer on all pairs of 4 x 48 objects", lambda: (Pairs(), (torch.randn(4, 48, 64),))),
        Case(
            "condition for 4 x 1024 points",
            lambda: (Conditioned(), (torch.randn(4, 1024, 128), torch.randn(4, 256))),
        ),
    ),
    "move_matmul_before_gather": (
        Case(
            "1x1 convolution of images of 16 and 32 pixels, inference",
            lambda: (Neck().eval(), (torch.randn(1, 128, 16, 16), torch.randn(1, 64, 32, 32))),
            training=False,
        ),
    ),
    "chunk_logits": (
        Case(
            "loss of 1024 tokens, vocabulary 16000",
            lambda: (LanguageLoss(), (torch.randn(1024, 128), _tokens(1024, high=16000))),
        ),
    ),
    "concat_matmuls": (
        Case("two GRU cells and logits, 12 steps of 8 x 256", _unrolled, options=_WHOLE),
        Case("the same, inference", _unrolled, training=False, options=_WHOLE),
    ),
    "fuse_matmul_sums": (Case("two GRU cells and logits, 12 steps of 8 x 256", _unrolled, options=_WHOLE),),
    "skip_zero_rows": (
        Case(
            "transformer, 3 layers, 4 x 197 tokens, training",
            lambda: (FirstToken(), (torch.randn(4, 197, 192),)),
            partner="hoist_slices",
        ),
    ),
    "use_onednn_convolutions": (
        Case("two bottlenecks of a residual net", lambda: (Bottlenecks(), (torch.randn(2, 128, 28, 28),))),
        Case(
            "the same, inference",
            lambda: (Bottlenecks().eval(), (torch.randn(2, 128, 28, 28),)),
            training=False,
        ),
    ),
    "use_onednn_matmuls": (
        Case("two MLP blocks with dropout", lambda: (Dropped(), (torch.randn(512, 256),))),
        Case("the same, inference", lambda: (Dropped().eval(), (torch.randn(512, 256),)), training=False),
    ),
    "hoist_slices": (
        Case(
            "GPT, 2 layers, next token after 256",
            lambda: (NextToken().eval(), (_tokens(1, 256),)),
            training=False,
        ),
        Case(
            "ViT, 3 layers, 4 x 197 tokens",
            lambda: (FirstToken().eval(), (torch.randn(4, 197, 192),)),
            training=False,
        ),
    ),
}
