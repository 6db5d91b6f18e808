"""Small models of many kinds, each with inputs of a given size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fxpasses.demo.gpt import GPT


@dataclass(frozen=True)
class Entry:
    """How to build a model and its positional inputs; ``size`` is the part of the shape that changes."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple]
    training: bool = True


class ConvNet(nn.Module):
    """Residual blocks with batch norm, whose running statistics are updated in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(3))
        self.down = nn.Conv2d(8, 16, 3, stride=2)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = x + conv(F.relu(norm(x)))
        x = F.max_pool2d(F.relu(self.down(x)), 2)
        return self.head(x.mean((2, 3)))


class EncoderDecoder(nn.Module):
    """A transformer with cross attention, a causal mask and a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 31)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        memory = self.encoder(self.embed(source), src_key_padding_mask=source == 0)
        return self.head(self.decoder(self.embed(target), memory, tgt_mask=causal))


class MixtureOfExperts(nn.Module):
    """Each token goes to its two best experts; every expert is computed and weighted."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, 16, 32) * 0.2)
        self.down = nn.Parameter(torch.randn(4, 32, 16) * 0.2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        routing = torch.zeros(*x.shape[:-1], 4, dtype=x.dtype, device=x.device).scatter(-1, chosen, weights)
        hidden = F.silu(torch.einsum("btd,edh->bteh", x, self.up))
        y = torch.einsum("bteh,ehd,bte->btd", hidden, self.down, routing)
        return x + y, routing.mean((0, 1))


class ManyOutputs(nn.Module):
    """Integer, missing and flag inputs; a dictionary of outputs, one of them an input, one without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.linear = nn.Linear(8, 8)

    def forward(self, index: Tensor, x: Tensor, bias: Tensor | None, flip: bool) -> dict[str, Tensor | None]:
        y = self.linear(self.table(index).sum(1) + x)
        if bias is not None:
            y = y + bias
        if flip:
            y = y.flip(0)
        return {"y": y, "norm": y.pow(2).sum(-1), "x": x, "best": y.argmax(-1), "bias": bias}


class Checkpointed(nn.Module):
    """Two blocks whose activations are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12), nn.LayerNorm(12)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


class Unrolled(nn.Module):
    """A recurrent cell applied a few times."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], 10)
        for step in range(4):
            state = self.cell(x[:, step], state)
        return state


class AutoEncoder(nn.Module):
    """Strided and transposed convolutions, group norm and interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(1, 4, 3, 2, 1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 8, 3, 2, 1)
        )
        self.decode = nn.ConvTranspose2d(8, 4, 4, 2, 1)
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.decode(self.encode(x)))
        return self.out(F.interpolate(y, scale_factor=2.0, mode="nearest"))


class Autocast(nn.Module):
    """Matrix products in bfloat16 inside, float32 outside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is torch.float64:  # the reference for the tolerance
            return self.second(self.first(x).relu())
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return self.second(self.first(x).relu()).float()


class Counting(nn.Module):
    """Buffers of its own, updated in place: a counter and a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.no_grad():
            self.steps += 1
            self.average.lerp_(y.detach().mean(0), 0.1)
        return y * self.average + x.clone().mul_(2)


class Relative(nn.Module):
    """Attention with relative position buckets and tensors written into the code."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.bias = nn.Embedding(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        place = torch.arange(time, device=x.device)
        distance = (place[None, :] - place[:, None]).abs()
        far = (distance.float() / 2 + 1).log().mul(2).long() + 2
        bucket = torch.where(distance < 2, distance, far.clamp(max=7))
        scores = q @ k.transpose(-1, -2) / 2 + self.bias(bucket).permute(2, 0, 1)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, time, width)
        return y * torch.tensor([1.0, -1.0, 0.5, 2.0, 1.0, -1.0, 0.5, 2.0], dtype=x.dtype, device=x.device)


def _tokens(*shape: int, high: int = 31) -> Tensor:
    return torch.randint(1, high, shape)


def _grad(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


ZOO: dict[str, Entry] = {
    "gpt": Entry(lambda: GPT(2, 16, 2, 32, 40), lambda n: (_tokens(n, 8), _tokens(n, 8))),
    "convnet": Entry(ConvNet, lambda n: (_grad(n, 3, 12, 12),)),
    "encoder_decoder": Entry(EncoderDecoder, lambda n: (_tokens(n, 7), _tokens(n, 5))),
    "mixture_of_experts": Entry(MixtureOfExperts, lambda n: (_grad(n, 5, 16),)),
    "many_outputs": Entry(ManyOutputs, lambda n: (_tokens(n, 3, high=11), _grad(n, 8), None, True)),
    "checkpointed": Entry(Checkpointed, lambda n: (_grad(n, 12),)),
    "unrolled": Entry(Unrolled, lambda n: (_grad(n, 4, 6),)),
    "autoencoder": Entry(AutoEncoder, lambda n: (_grad(n, 1, 16, 16),)),
    "autocast": Entry(Autocast, lambda n: (_grad(n, 16),)),
    "relative": Entry(Relative, lambda n: (_grad(n, 6, 8),)),
    "counting": Entry(Counting, lambda n: (_grad(n, 7),)),
}
