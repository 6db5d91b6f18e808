"""Tensors that calls put in each other's place: an attribute or a buffer that a frame sets, as a recurrent state is, holds another tensor in each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fxpasses.plans import _torch
from fxpasses.plans.arguments import SameArguments
from fxpasses.plans.errors import NoPlan

Place = tuple[dict[Any, Any], Any]
"""Where a tensor is: a dictionary and the key there."""


def numbers_of_exchanged(
    exchanged: Sequence[Place],
    places: Mapping[int, Place],
    tensors: Sequence[torch.Tensor],
    *,
    reads_gradients: bool,
) -> list[int]:
    """The numbers of tensors in whose places a frame puts others.

    Args:
        exchanged: the places.
        places: all places of tensors that are in one alone, by their numbers.
        tensors: those of a walk.
        reads_gradients: whether the plan depends on gradients.

    Returns: the numbers, in order.

    Raises:
        NoPlan: one is elsewhere, too, or a plan could not tell that another one is the same but for its values.
    """
    met = set(map(id, tensors))
    keys = {
        (id(values), key) for values, key in exchanged if id(values.get(key)) in met
    }  # others nobody reads
    found = [number for number, (values, key) in places.items() if (id(values), key) in keys]
    now = [tensors[number] for number in found]
    if len(found) < len(keys) or (
        found and (reads_gradients or not SameArguments.can_compare(tuple(now), {}, now, ()))
    ):
        raise NoPlan(
            "a frame that changes an object", "where a tensor is that is elsewhere, too, or has no memory"
        )
    return sorted(found)


class Exchanged:
    """The tensors that are in some places now, which have to be what those were that a walk has met there, but for their values.

    Args:
        places: where they are, by their numbers among the tensors of the walk.
        tensors: those of the walk, in which the present ones are put.
    """

    def __init__(self, places: Mapping[int, Place], tensors: list[torch.Tensor]) -> None:
        self._places, self._tensors = dict(places), tensors
        now = self._now()
        others = [tensor for i, tensor in enumerate(tensors) if i not in places]
        self._same = SameArguments(tuple(now), {}, now, (), others)

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def hold(self) -> bool:
        """Whether they are: different ones, and none that is elsewhere, too."""
        now = self._now()
        if any(value is None for value in now) or self._same.tensors(tuple(now), {}) is None:
            return False
        for number, value in zip(self._places, now, strict=True):
            self._tensors[number] = value
        return True

    def memory(self) -> list[int]:
        """Where their memory is."""
        return list(map(_torch.storage_address, self._now()))

    def are_none_of(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether none is an argument. Args: the tensors among those of a call."""
        return set(map(id, self._now())).isdisjoint(map(id, arguments))

    def _now(self) -> list[Any]:
        return [values.get(key) for values, key in self._places.values()]
