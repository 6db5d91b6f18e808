"""What a compilation may rely on about a tensor, besides its values."""

from __future__ import annotations

from typing import Any

import torch

from fxpasses.plans import _torch
from fxpasses.plans.errors import NoPlan

TENSOR_FACTS = (
    "class",
    "sizes",
    "strides",
    "place in its memory",
    "dtype",
    "requires_grad",
    "is_leaf",
    "is_conj",
    "is_neg",
    "is_inference",
)
"""The names of the values of :func:`tensor_facts`."""


def facts_without_sizes(facts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Generalize :func:`tensor_facts` to all sizes, strides and offsets with as many dimensions."""
    kind, sizes, _, _, *others = facts
    return kind, len(sizes), None, None, *others


def tensor_facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The metadata of a tensor that a compilation may rely on.

    Raises:
        NoPlan: it is of a kind that plans do not support.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise NoPlan("a tensor subclass", type(tensor).__qualname__)
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise NoPlan("a tensor without strides", str(tensor.layout))
    if tensor.device.type != "cpu":
        raise NoPlan("a tensor that is not on the CPU", str(tensor.device))
    if _torch.is_in_transform(tensor):
        raise NoPlan("a tensor inside of a function transform")
    if (leaf := is_leaf(tensor)) is None:
        raise NoPlan("one of several views of a tensor that was changed")
    return (
        type(tensor).__name__, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), str(tensor.dtype),
        tensor.requires_grad, leaf, tensor.is_conj(), tensor.is_neg(), tensor.is_inference(),
    )  # fmt: skip


def is_leaf(tensor: torch.Tensor) -> bool | None:
    """Whether autograd has no history of a tensor.

    ``None`` if it refuses to say: for one of several views (``split``) whose base was mutated without
    gradients.
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return None
