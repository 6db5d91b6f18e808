"""Seam: the hooks of tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch


@contextlib.contextmanager
def without_hooks(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within, hooks of these leaves do not run."""
    hooked = [(tensor, hooks) for tensor in tensors if (hooks := tensor._backward_hooks)]
    for tensor, _ in hooked:
        tensor._backward_hooks = None
    try:
        yield
    finally:
        for tensor, hooks in hooked:
            tensor._backward_hooks = hooks
