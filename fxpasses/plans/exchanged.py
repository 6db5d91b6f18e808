"""Tensors that calls put in each other's place: an attribute or a buffer that a frame sets, as a recurrent state is, holds another tensor in each call."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from fxpasses.plans import _torch
from fxpasses.plans.arguments import SameArguments
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.gradients import have_none

Entries = dict[Any, Any] | list[Any]


def entry_of(values: Entries, key: Any) -> Any:
    """What is in an entry of a dictionary, or in a place of a list; ``None`` where nothing is. Args: them, and which one."""
    if type(values) is list:
        return values[key] if key < len(values) else None
    return values.get(key)  # type: ignore[union-attr]


class Place(NamedTuple):
    """Where a tensor is: a dictionary and the key there, or a list and the position, and in a tuple of tensors that is there which one of how many."""

    values: Entries
    key: Any
    number: int = 0
    length: int | None = None

    def now(self) -> Any:
        """What is there."""
        value = entry_of(self.values, self.key)
        if self.length is None:
            return value
        return value[self.number] if type(value) is tuple and len(value) == self.length else None


def places_of(values: Entries, key: Any, tensors: Sequence[torch.Tensor]) -> list[Place]:
    """The places of the tensors that a walk has met in an entry of a dictionary or list, if it is one or a tuple of them.

    Args:
        values: the dictionary or list.
        key: of the entry.
        tensors: those that were met there.
    """
    item = entry_of(values, key)
    if len(tensors) == 1 and item is tensors[0]:
        return [Place(values, key)]
    if type(item) is tuple and len(item) == len(tensors) and all(map(operator.is_, item, tensors)):
        return [Place(values, key, i, len(item)) for i in range(len(item))]
    return []


PlaceKey = tuple[int, Any]
"""Which entry of a dictionary or list a place is in: the identity of that, and the key."""


def key_of(place: Place) -> PlaceKey:
    """Which entry a place is in."""
    return id(place.values), place.key


def are_alone(numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether it can be told of others that they are the same as tensors but for their values: each has memory of its own, and no gradient.

    Args:
        numbers: of the tensors.
        tensors: those of a walk.
    """
    now = [tensors[number] for number in numbers]
    return have_none(now) and SameArguments.can_compare(tuple(now), {}, now, ())


def numbers_of_exchanged(
    exchanged: Sequence[tuple[Entries, Any]],
    places: Mapping[int, Place],
    tensors: Sequence[torch.Tensor],
    grow: Set[int],
) -> list[int]:
    """The numbers of tensors in whose places a frame puts others, and of those that other frames let grow.

    Args:
        exchanged: the dictionaries and keys, lists and positions.
        places: all places of tensors that are in one alone, by their numbers.
        tensors: those of a walk.
        grow: the numbers of those with symbolic sizes.

    Returns: the numbers, in order.

    Raises:
        NoPlan: one is elsewhere, too, or a plan could not tell that another one is the same but for its values.
    """
    met, there = set(map(id, tensors)), dict[PlaceKey, tuple[Any, ...]]()
    for values, key in exchanged:
        value = entry_of(values, key)
        held = value if type(value) is tuple else (value,)
        if not met.isdisjoint(map(id, held)):  # of others nobody reads anything
            there[id(values), key] = held
    put = {number for number, place in places.items() if key_of(place) in there}
    # What had no memory is not exchanged: once it has some, it is another content.
    found = sorted(number for number in put | grow if tensors[number].numel())
    if len(put) < sum(map(len, there.values())) or (found and not are_alone(found, tensors)):
        raise NoPlan(
            "a frame that changes an object", "where a tensor is that is elsewhere, too, or has no memory"
        )
    return found


class Exchanged:
    """The tensors that are in some places now, which have to be what those were that a walk has met there, but for their values.

    Args:
        places: where they are, by their numbers among the tensors of the walk.
        tensors: those of the walk, in which the present ones are put.
        grow: the numbers of those that may have other sizes, about which a plan has guards.
    """

    def __init__(
        self, places: Mapping[int, Place], tensors: list[torch.Tensor], grow: Collection[int] = ()
    ) -> None:
        self._places, self._tensors = dict(places), tensors
        now = self._now()
        others = [tensor for i, tensor in enumerate(tensors) if i not in places]
        growing = [i for i, number in enumerate(self._places) if number in grow]
        self._same = SameArguments(tuple(now), {}, now, (), others, grow=growing)

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def hold(self) -> bool:
        """Whether they are: different ones, none that is elsewhere, too, and none with a gradient."""
        now = self._now()
        if (
            any(value is None for value in now)
            or self._same.tensors(tuple(now), {}) is None
            or not have_none(now)
        ):
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
        return [place.now() for place in self._places.values()]
