"""Gradients as inputs of a plan: code that reads ``parameter.grad`` finds another tensor there in each step, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fxpasses.plans import _torch, _torch_notes
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.tensor_facts import is_leaf, tensor_facts

Facts = list[list[Any]]
"""For each tensor that may have a gradient its place, and the facts of the gradient or None."""


def facts_of_gradients(tensors: Sequence[torch.Tensor]) -> Facts:
    """What the gradients of these tensors are, as JSON has it.

    Raises:
        NoPlan: one is of a kind that plans do not know.
    """
    known, found = set(map(id, tensors)), Facts()
    storages = {_memory_of(tensor): i for i, tensor in enumerate(tensors) if tensor.numel()}
    for i, tensor in enumerate(tensors):
        if not is_leaf(tensor):
            continue
        if (gradient := tensor.grad) is None:
            found.append([i, None])
            continue
        if id(gradient) in known or _torch_notes.marks_of(gradient) != ():
            raise NoPlan("a gradient that is something else, too")
        known.add(id(gradient))
        shared = storages.setdefault(_memory_of(gradient), len(tensors) + i) if gradient.numel() else -1
        facts = (shared, *tensor_facts(gradient))
        found.append([i, [list(fact) if isinstance(fact, tuple) else fact for fact in facts]])
    return found


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def have_none(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no tensor of these has a gradient."""
    return all(tensor.grad is None for tensor in tensors if is_leaf(tensor))


class Gradients:
    """The gradients that a plan asks for.

    Args:
        tensors: the tensors that the plan knows.
        facts: see :func:`facts_of_gradients`; they hold now.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], facts: Facts) -> None:
        self._owners = {i: tensors[i] for i, _ in facts}
        self._others = frozenset(map(id, tensors))
        self._with = [tensors[i] for i, told in facts if told is not None]
        self._without = [tensors[i] for i, told in facts if told is None]
        now: list[Any] = [owner.grad for owner in self._with]
        self._kept = [(value.storage_offset(), is_leaf(value)) for value in now]
        self._guards = _torch.tensor_guards(now) if now else None

    def __getitem__(self, place: int) -> torch.Tensor | None:
        return self._owners[place].grad

    def hold(self) -> bool:
        """Whether there are those that there were, and each is as it was but for its values."""
        if any(owner.grad is not None for owner in self._without):
            return False
        if self._guards is None:
            return True
        now: list[Any] = [owner.grad for owner in self._with]
        if any(value is None for value in now) or not self._guards.check(*now):
            return False  # the guards also ask that they are different ones
        return self._others.isdisjoint(map(id, now)) and all(
            value.storage_offset() == offset and is_leaf(value) is leaf and _torch_notes.marks_of(value) == ()
            for value, (offset, leaf) in zip(now, self._kept, strict=True)
        )

    def memory(self) -> list[int]:
        """Where their memory is."""
        now: list[Any] = [owner.grad for owner in self._with]
        return [_memory_of(value) for value in now if value.numel()]
