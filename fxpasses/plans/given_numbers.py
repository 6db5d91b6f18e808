"""Numbers among the arguments of a call: integers and floats of which Dynamo makes inputs of a graph, once they have been others."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fxpasses.plans.errors import NoPlan
from fxpasses.plans.frames import function_of
from fxpasses.plans.named_attributes import number_now


class GivenNumbers(threading.local):
    """Those of the call that this thread is about to make, as attributes: by their position, as text, or their name."""

    def see(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take those of a call. Args: its arguments."""
        found = vars(self)
        found.clear()
        found.update(numbers_among(args, kwargs))

    def may_be(self, kinds: Mapping[str, str]) -> bool:
        """Whether each may be an input. Args: ``"int"`` or ``"float"`` for each."""
        given = vars(self)
        return all(
            number_now(self, place) is not None if kind == "int" else type(given.get(place)) is float
            for place, kind in kinds.items()
        )

    def are(self, others: Mapping[str, str]) -> bool:
        """Whether others are what they were. Args: what each was, as text."""
        given = vars(self)
        return all(repr(given.get(place)) == was for place, was in others.items())

    def input(self, place: str) -> int | torch.Tensor:
        """One as an input: Dynamo hands over a float as a tensor. Args: where it is."""
        value = vars(self)[place]
        return torch.tensor(value, dtype=torch.float64) if type(value) is float else int(value)


def numbers_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, int | float]:
    """The integers and floats that are arguments themselves, by their position, as text, or their name. Args: the arguments."""
    named = [*((str(i), value) for i, value in enumerate(args)), *kwargs.items()]
    return {place: value for place, value in named if type(value) in (int, float)}


def names_of_numbers(model: Any, places: Iterable[str]) -> dict[str, str]:
    """The places of numbers, by the names of the parameters that they are; an argument that has no parameter of its own is left out.

    Args:
        model: what is called.
        places: of the numbers.
    """
    try:
        function, first = function_of(model)
    except NoPlan:
        return {}
    code, found = function.__code__, dict[str, str]()
    positional = code.co_varnames[len(first) : code.co_argcount]
    for place in places:
        if not place.isdigit():
            found[place] = place
        elif int(place) < len(positional):
            found[positional[int(place)]] = place
    return found


def without_given_numbers(described: Any) -> Any:
    """A description of arguments that leaves open which numbers are arguments themselves."""

    def kind_alone(value: Any) -> Any:
        return value[:1] if len(value) == 2 and value[0] in ("int", "float") else value

    args, kwargs = described
    return tuple(map(kind_alone, args)), tuple((name, kind_alone(value)) for name, value in kwargs)
