"""Text that every machine with Python has: the source of the standard library."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor


def standard_library_bytes(at_most: int = 1_000_000) -> Tensor:
    """Return the first ``at_most`` bytes of the standard library's modules, in order of name: ``int64[n]``.

    Raises:
        FileNotFoundError: Python was installed without its source.
    """
    folder = Path(os.__file__).parent
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= at_most:
            break
    if len(text) < 10_000:
        raise FileNotFoundError(
            f"no standard library source in {folder}: this Python was installed without it"
        )
    return torch.frombuffer(bytearray(text[:at_most]), dtype=torch.uint8).long()


def batches(text: Tensor, steps: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Sample batches of varying sizes from a text.

    Args:
        text: tokens, ``int64[n]``.
        steps: the number of batches.
        context: the longest sequence, in tokens. The length of each batch is between half of it and all of
            it.
        seed: the seed of the random sizes and positions.

    Yields:
        Tokens and next tokens, both ``int64[batch, time]``, with a batch of 4 to 12.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = int(torch.randint(4, 13, (), generator=generator))
        time = int(torch.randint(context // 2, context + 1, (), generator=generator))
        starts = torch.randint(0, len(text) - time - 1, (batch,), generator=generator)
        rows = text[starts[:, None] + torch.arange(time + 1)]
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
