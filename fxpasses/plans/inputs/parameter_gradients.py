"""Gradients as inputs of a plan: in each step, ``parameter.grad`` may be another tensor or None."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fxpasses.plans import _torch
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.inputs.arguments import SameArguments
from fxpasses.plans.objects import _torch_notes
from fxpasses.plans.tensors.shards import distribution_of, is_sharded, parts_of, sharded_facts
from fxpasses.plans.tensors.tensor_facts import is_leaf, tensor_facts

_storage_address, _offset = _torch.storage_address, torch.Tensor.storage_offset

Facts = list[list[Any]]
"""For each tensor that may have a gradient: its position, and the facts of the gradient or None."""


def facts_of_gradients(tensors: Sequence[torch.Tensor]) -> Facts:
    """The facts of these tensors' gradients, as JSON.

    Raises:
        NoPlan: one is of a kind that plans do not support.
    """
    known, found = set(map(id, tensors)), Facts()
    storages = {_storage_address(tensor): i for i, tensor in enumerate(tensors) if tensor.numel()}
    for i, tensor in enumerate(tensors):
        if not is_leaf(tensor):
            continue
        if (gradient := tensor.grad) is None:
            found.append([i, None])
            continue
        if id(gradient) in known or _torch_notes.dynamic_marks(gradient) != ():
            raise NoPlan("a gradient that is something else, too")
        known.add(id(gradient))
        own, facts = gradient, tuple[Any, ...]()
        if is_sharded(gradient):
            own, facts = parts_of(gradient)[0], (*sharded_facts(gradient), *distribution_of(gradient))
        facts += tensor_facts(own)
        shared = storages.setdefault(_storage_address(own), len(tensors) + i) if own.numel() else -1
        found.append([i, [list(fact) if isinstance(fact, tuple) else fact for fact in (shared, *facts)]])
    return found


def have_no_gradients(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether none of these tensors has a gradient."""
    return all(tensor.grad is None for tensor in tensors if is_leaf(tensor))


class Gradients:
    """The gradients that a plan reads.

    Args:
        tensors: the tensors that the plan knows.
        facts: from :func:`facts_of_gradients`; they hold now.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], facts: Facts) -> None:
        self._owners = {i: tensors[i] for i, _ in facts}
        self._others = frozenset(map(id, tensors))
        self._with_gradient = [tensors[i] for i, known in facts if known is not None]
        self._without_gradient = [tensors[i] for i, known in facts if known is None]
        self._distributed = [_distribution(owner.grad) for owner in self._with_gradient]
        now = self._current()
        self._offsets = list(map(_offset, now))
        self._leaf_flags = [(i, is_leaf(value)) for i, value in enumerate(now) if value.requires_grad]
        self._guards = _torch.tensor_guards(now) if now else None
        self._are_empty = any(not value.numel() for value in now)
        self._same: SameArguments | None = None
        if now and not any(self._distributed) and SameArguments.can_compare(tuple(now), {}, now, ()):
            self._same = SameArguments(tuple(now), {}, now, (), tensors)

    def __getitem__(self, place: int) -> torch.Tensor | None:
        return self._owners[place].grad

    def hold(self) -> bool:
        """Whether the same tensors have gradients, and each gradient differs only in its values."""
        if any(owner.grad is not None for owner in self._without_gradient):
            return False
        if self._guards is None:
            return True
        now = self._current()
        if self._same is not None:
            return self._same.tensors(tuple(now), {}) is not None
        if len(now) != len(self._offsets) or not self._guards.check(*now):
            return False  # one is gone, of another kind, or the same as another
        if [_distribution(owner.grad) for owner in self._with_gradient] != self._distributed:
            return False
        return (
            self._others.isdisjoint(map(id, now))
            and list(map(_offset, now)) == self._offsets
            and all(is_leaf(now[i]) is leaf for i, leaf in self._leaf_flags)
            and all(_torch_notes.dynamic_marks(value) == () for value in now if value.__dict__)
        )

    def storage_addresses(self) -> list[int]:
        """Their storage addresses."""
        now = [value for value in self._current() if not is_sharded(value)]
        return list(map(_storage_address, filter(torch.Tensor.numel, now) if self._are_empty else now))

    def _current(self) -> list[Any]:
        """The gradients. Each sharded one is followed by its shard."""
        now = [owner.grad for owner in self._with_gradient]
        if not any(self._distributed):
            return now
        return [
            part for value in now for part in ((value, parts_of(value)[0]) if is_sharded(value) else (value,))
        ]


def _distribution(gradient: Any) -> Any:
    return (gradient.placements, gradient.device_mesh) if is_sharded(gradient) else None
