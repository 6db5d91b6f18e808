"""Exchanged tensors: a frame sets an attribute or buffer, such as a recurrent state, anew in each call."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from fxpasses.plans import _torch
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.inputs.arguments import SameArguments
from fxpasses.plans.inputs.parameter_gradients import have_no_gradients

Entries = dict[Any, Any] | list[Any]


def entry_of(values: Entries, key: Any) -> Any:
    """The value at a key of a dictionary or an index of a list. ``None`` if there is none."""
    if type(values) is list:
        return values[key] if key < len(values) else None
    return values.get(key)  # type: ignore[union-attr]


class Place(NamedTuple):
    """Where a tensor is: a dictionary and key, or a list and index. If the entry is a tuple of tensors, also
    its index there and the tuple's length."""

    values: Entries
    key: Any
    number: int = 0
    length: int | None = None

    def now(self) -> Any:
        """What is there now."""
        value = entry_of(self.values, self.key)
        if self.length is None:
            return value
        return value[self.number] if type(value) is tuple and len(value) == self.length else None


def places_of(values: Entries, key: Any, tensors: Sequence[torch.Tensor]) -> list[Place]:
    """The places of the tensors that a walk has met in an entry, if the entry is a tensor or a tuple of
    tensors.

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
"""The entry of a place: the ``id`` of its dictionary or list, and the key."""


def key_of(place: Place) -> PlaceKey:
    """The entry that a place is in."""
    return id(place.values), place.key


def are_exchangeable(numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a plan could tell that other tensors differ from these only in their values.

    Each must have memory of its own, and no gradient.

    Args:
        numbers: of the tensors.
        tensors: those of a walk.
    """
    now = [tensors[number] for number in numbers]
    return have_no_gradients(now) and SameArguments.can_compare(tuple(now), {}, now, ())


def numbers_of_exchanged(
    exchanged: Sequence[tuple[Entries, Any]],
    places: Mapping[int, Place],
    tensors: Sequence[torch.Tensor],
    grow: Set[int],
) -> list[int]:
    """The numbers of tensors that a frame replaces, and of those that other frames let grow.

    Args:
        exchanged: the dictionaries and keys, lists and indices.
        places: by number, the places of tensors that are in one place only.
        tensors: those of a walk.
        grow: the numbers of those with symbolic sizes.

    Returns:
        The numbers, in order.

    Raises:
        NoPlan: one is also elsewhere, or a plan could not tell that its replacement differs only in its
            values.
    """
    met, replaced_entries = set(map(id, tensors)), dict[PlaceKey, tuple[Any, ...]]()
    for values, key in exchanged:
        value = entry_of(values, key)
        held = value if type(value) is tuple else (value,)
        if not met.isdisjoint(map(id, held)):  # nothing reads the others
            replaced_entries[id(values), key] = held
    replaced = {number for number, place in places.items() if key_of(place) in replaced_entries}
    # A tensor without memory is not exchanged: once it has memory, its content differs.
    found = sorted(number for number in replaced | grow if tensors[number].numel())
    if len(replaced) < sum(map(len, replaced_entries.values())) or (
        found and not are_exchangeable(found, tensors)
    ):
        raise NoPlan(
            "a frame that changes an object", "where a tensor is that is elsewhere, too, or has no memory"
        )
    return found


class Exchanged:
    """The tensors in some places, which may differ from those of the walk only in their values.

    Args:
        places: by number, where they are.
        tensors: those of the walk, updated to the current ones.
        grow: the numbers of those whose sizes may change, on which a plan has guards.
    """

    def __init__(
        self, places: Mapping[int, Place], tensors: list[torch.Tensor], grow: Collection[int] = ()
    ) -> None:
        self._places, self._tensors = dict(places), tensors
        now = self._current()
        others = [tensor for i, tensor in enumerate(tensors) if i not in places]
        growing = [i for i, number in enumerate(self._places) if number in grow]
        self._same = SameArguments(tuple(now), {}, now, (), others, grow=growing)

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def hold(self) -> bool:
        """Whether they differ only in values, are distinct, are nowhere else, and have no gradient."""
        now = self._current()
        if (
            any(value is None for value in now)
            or self._same.tensors(tuple(now), {}) is None
            or not have_no_gradients(now)
        ):
            return False
        for number, value in zip(self._places, now, strict=True):
            self._tensors[number] = value
        return True

    def storage_addresses(self) -> list[int]:
        """Their storage addresses."""
        return list(map(_torch.storage_address, self._current()))

    def are_disjoint_from(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether none of them is among ``arguments``."""
        return set(map(id, self._current())).isdisjoint(map(id, arguments))

    def _current(self) -> list[Any]:
        return [place.now() for place in self._places.values()]
