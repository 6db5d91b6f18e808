"""Numbers among the arguments of a call. Dynamo makes an integer or float an input once it has changed."""

from __future__ import annotations

import threading
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fxpasses.plans.errors import NoPlan
from fxpasses.plans.graph_breaks.frames import function_of
from fxpasses.plans.objects.named_attributes import current_integer


class GivenNumbers(threading.local):
    """The numbers of this thread's next call.

    Attributes:
        values: the numbers, as attributes named by position (as text) or keyword.
    """

    values = types.SimpleNamespace()

    def update_from(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Take the numbers of a call."""
        self.values = types.SimpleNamespace(**numbers_among(args, kwargs))

    def fit_kinds(self, kinds: Mapping[str, str]) -> bool:
        """Whether each number can be an input of its kind, ``"int"`` or ``"float"``."""
        given = vars(self.values)
        return all(
            current_integer(self.values, place) is not None
            if kind == "int"
            else type(given.get(place)) is float
            for place, kind in kinds.items()
        )

    def have_values(self, others: Mapping[str, str]) -> bool:
        """Whether these numbers are unchanged. ``others`` maps each place to its value, as text."""
        given = vars(self.values)
        return all(repr(given.get(place)) == was for place, was in others.items())

    def as_input(self, place: str) -> int | torch.Tensor:
        """The number at ``place`` as a graph input. Dynamo passes a float as a tensor."""
        value = vars(self.values)[place]
        return torch.tensor(value, dtype=torch.float64) if type(value) is float else int(value)


def numbers_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, int | float]:
    """The integers and floats that are arguments themselves, by position (as text) or keyword."""
    named = [*((str(i), value) for i, value in enumerate(args)), *kwargs.items()]
    return {place: value for place, value in named if type(value) in (int, float)}


def names_of_numbers(model: Any, places: Iterable[str]) -> dict[str, str]:
    """Map parameter names to the places of numbers. An argument without a parameter of its own is left out.

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
    """A description of arguments without the values of numbers that are arguments themselves."""

    def kind_alone(value: Any) -> Any:
        return value[:1] if len(value) == 2 and value[0] in ("int", "float") else value

    args, kwargs = described
    return tuple(map(kind_alone, args)), tuple((name, kind_alone(value)) for name, value in kwargs)
