"""Where a graph that calls compiled regions goes another way than the graph that they were cut from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import fx

from fxpasses.checking.blame import first_difference
from fxpasses.checking.inputs import Unsupported, cloned

__all__ = ["RegionCalls"]


class RegionCalls:
    """The graphs in which regions were found, and the inputs of their first calls.

    Attributes:
        found: each graph before, the graph that calls regions instead, and inputs.
    """

    def __init__(self) -> None:
        self.found: list[tuple[fx.GraphModule, fx.GraphModule, list[Any]]] = []

    def watch(
        self, before: fx.GraphModule, after: fx.GraphModule, compiled: Callable[..., Any]
    ) -> Callable[..., Any]:
        """``compiled``, which keeps the inputs of its first call."""
        inputs: list[Any] = []
        self.found.append((before, after, inputs))

        def run(*args: Any) -> Any:
            if not inputs:
                with contextlib.suppress(Unsupported):
                    inputs.extend(cloned(args))
            return compiled(*args)

        return run

    def first_wrong_module(self) -> str:
        """The module of the first node whose value differs; that of the first region when none that both graphs have does."""
        for before, after, inputs in self.found:
            if inputs and (module := first_difference(before, after, inputs).module):
                return module
        return ""
