"""Operators with one fault each that their sample does not reveal, and correct ones for comparison.

`WRONG` and `RIGHT` map a name to a function that defines the operator and returns ``(operator, arguments)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fake.library import custom_op
from tests.fake.library.support import fresh_name

__all__ = ["RIGHT", "TT", "WRONG", "T", "broadcast", "like", "r", "right", "save", "wrong"]

Plant = Callable[[], tuple[Any, tuple[Any, ...]]]
WRONG: dict[str, Plant] = {}
RIGHT: dict[str, Plant] = {}

T, TT = "(Tensor x) -> Tensor", "(Tensor x, Tensor y) -> Tensor"


def r(*shape, grad=False, **options):
    """A random tensor, the same in each run."""
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(sum(shape) + 1), **options
    ).requires_grad_(grad)


def make(schema, kernel, fake, backward=None, saved=None, mutates=(), vmap=None):
    """An operator; ``saved(ctx, inputs, output)`` is its setup_context."""
    op = custom_op(fresh_name("plant"), kernel, mutates_args=mutates, schema=schema)
    if fake is not None:
        op.register_fake(fake)
    if backward is not None:
        op.register_autograd(backward, setup_context=saved)
    if vmap is not None:
        op.register_vmap(vmap)
    return op


def plant(
    table: dict[str, Plant], name: str, args: Callable[[], tuple[Any, ...]], *parts: Any, **more: Any
) -> None:
    assert name not in table
    table[name] = lambda: (make(*parts, **more), args())


def wrong(name, args, *parts, **more):
    plant(WRONG, name, args, *parts, **more)


def right(name, args, *parts, **more):
    plant(RIGHT, name, args, *parts, **more)


def like(x, *_, **__):
    return torch.empty_like(x)


def save(ctx, inputs, output):
    ctx.save_for_backward(*(i for i in inputs if isinstance(i, torch.Tensor)), output)
    ctx.others = [i for i in inputs if not isinstance(i, torch.Tensor)]
    ctx.shape = inputs[0].shape if isinstance(inputs[0], torch.Tensor) else None


def broadcast(x, y, *_):
    return torch.empty_like(x + y)
