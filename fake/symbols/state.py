"""What lean nodes remember of one shape environment.

C++ asks a node for its value as a plain number tens of thousands of times in a traced step. A node of an expression that
is remembered anyway gets this answer as an attribute of its own, which spares the method, and loses it again as soon as
the environment replaces a symbol.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from fake import _torch as _t

# Called by C++ without arguments, ten thousand times a step: a method of a constant needs no Python frame.
_nothing: Callable[[], None] = [].clear


class Integers(dict[int, Any]):
    """The nodes of integer constants, made when they are first asked for."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, number: int) -> Any:
        node = self[number] = self._make(number)
        return node


class Replacements(dict[Any, Any]):
    """The replaced symbols of an environment; a new one ends the answers that depend on there being none."""

    def __init__(self, replacements: dict[Any, Any]) -> None:
        super().__init__(replacements)
        self.valueless: list[dict[str, Any]] = []

    def __setitem__(self, symbol: Any, expression: Any) -> None:
        super().__setitem__(symbol, expression)
        while self.valueless:
            self.valueless.pop().pop("maybe_as_int", None)

    def __deepcopy__(self, memo: dict) -> dict[Any, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self),))


class LeanState:
    """The memory of lean nodes for one shape environment (it lives on the environment and goes with it).

    Attributes:
        adopts: whether nodes that torch makes for the environment become lean when they are met.
        integers: the nodes of integer constants; None until one was made.
        truths: the nodes of true and false.
        log: whoever wants to know which remembered answers are used, or None (see ``fake.cache.evaluations``).
    """

    __slots__ = ("adopts", "canonical", "integers", "log", "truths")

    def __init__(self) -> None:
        self.adopts = False
        self.canonical: dict[Any, Any] = {}
        self.integers: Integers | None = None
        self.truths: dict[bool, Any] = {}
        self.log: Any = None

    def __deepcopy__(self, memo: dict) -> LeanState:
        return LeanState()

    def __reduce__(self) -> tuple[Any, ...]:
        return (LeanState, ())


def lean_state(shape_env: Any) -> LeanState:
    """The state of a shape environment, made at its first use."""
    try:
        return shape_env._fake_lean
    except AttributeError:
        _t.HIDDEN_FILES.tell_torch()
        state = shape_env._fake_lean = LeanState()
        shape_env.replacements = Replacements(shape_env.replacements)
        return state


def has_no_value_now(node: Any) -> None:
    """Let a canonical node say that it is no plain number, until a symbol is replaced."""
    replacements = node.shape_env.replacements
    if replacements.__class__ is Replacements:
        own = node.__dict__
        own["maybe_as_int"] = _nothing
        replacements.valueless.append(own)
