"""Shared parts of the benchmarks of the fake-tensor engine: the model, the timer, and the report."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

__all__ = ["GPT", "interleave", "parser", "report", "tokens"]


class Block(torch.nn.Module):
    """A GPT layer: attention and a feed-forward network, each after a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.project = torch.nn.Linear(width, width)
        self.feed_norm = torch.nn.LayerNorm(width)
        self.feed_in = torch.nn.Linear(width, 4 * width)
        self.feed_out = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x`` of shape ``[batch, tokens, width]`` to a tensor of the same shape."""
        batch, length, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        y = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(batch, length, width)
        )
        x = x + self.project(y)
        return x + self.feed_out(F.gelu(self.feed_in(self.feed_norm(x))))


class GPT(torch.nn.Module):
    """A small GPT that returns its loss: width 128, 4 heads, vocabulary 512."""

    def __init__(self, layers: int, width: int = 128, vocabulary: int = 512) -> None:
        super().__init__()
        self.token = torch.nn.Embedding(vocabulary, width)
        self.position = torch.nn.Embedding(256, width)
        self.blocks = torch.nn.ModuleList([Block(width, 4) for _ in range(layers)])
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the scalar loss of ``ids`` and ``targets``, both ``[batch, tokens]``."""
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def tokens() -> torch.Tensor:
    """Return a batch of 2 x 64 token ids."""
    return torch.randint(0, 512, (2, 64))


def parser(doc: str | None, **defaults: int) -> argparse.ArgumentParser:
    """Return an argument parser with an integer option for each default."""
    made = argparse.ArgumentParser(description=doc)
    for name, default in defaults.items():
        made.add_argument(f"--{name}", type=int, default=default)
    return made


def interleave(repeat: int, **contenders: Callable[[], float | None]) -> dict[str, list[float]]:
    """Return the seconds of each contender, run in turns so that slow moments of the machine affect all.

    A contender that returns a number has timed itself.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeat):
        for name, run in contenders.items():
            gc.collect()
            start = time.perf_counter()
            own = run()
            seconds[name].append(time.perf_counter() - start if own is None else own)
    return seconds


def report(title: str, torchs: list[float], ours: list[float], unit: float = 1e3, name: str = "ms") -> float:
    """Print both medians and their ratio. Return how many times faster ours is."""
    theirs, mine = statistics.median(torchs), statistics.median(ours)
    ratio = theirs / mine
    print(
        f"{title:34} torch {theirs * unit:10.2f} {name}   fake {mine * unit:10.2f} {name}   {ratio:7.2f} x faster"
    )
    return ratio
