"""What a pass is: a name, its options, the graphs that it takes, and one method.

>>> from torch import fx
>>> from fxpasses import Pass, graph_pass
>>> @graph_pass(graphs=["inference"])
... def drop_nothing(gm: fx.GraphModule) -> bool:
...     "Leave the graph as it is."
...     return False
>>> isinstance(drop_nothing, Pass), drop_nothing.name
(True, 'drop_nothing')
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from torch import fx

__all__ = ["FunctionPass", "GraphKind", "Pass", "graph_pass"]

GraphKind = Literal["joint", "forward", "backward", "inference"]
"""``joint``: forward and backward before the partition. ``forward`` and ``backward``: after it.
``inference``: the only graph of a call that needs no gradients."""


@dataclass(frozen=True)
class Pass(abc.ABC):
    """A rewrite of a graph. Subclasses are frozen dataclasses: their fields are the pass's options.

    The docstring of a pass shows a graph before and after. ``apply`` changes the graph in place and
    returns whether it changed anything. It must leave a graph that computes the same outputs, gradients
    included, with the same aliasing between inputs and outputs.
    """

    name: ClassVar[str]
    graphs: ClassVar[frozenset[GraphKind]]

    @abc.abstractmethod
    def apply(self, gm: fx.GraphModule) -> bool:
        """Rewrite ``gm`` in place; return whether anything changed."""

    def identity(self) -> str | None:
        """What decides the result of this pass, as a hash for the compile caches.

        Covers the source of the module that defines the pass, and its options. ``None`` when the source
        cannot be read (a pass typed into a prompt, say): graphs are then compiled without caching.
        """
        return _digest(type(self), self)


@dataclass(frozen=True)
class FunctionPass(Pass):
    """A pass made of a function by :func:`graph_pass`."""

    function: Callable[[fx.GraphModule], bool]
    name: str  # type: ignore[misc]
    graphs: frozenset[GraphKind]  # type: ignore[misc]

    def apply(self, gm: fx.GraphModule) -> bool:
        return self.function(gm)

    def identity(self) -> str | None:
        cells = self.function.__closure__ if inspect.isfunction(self.function) else None
        if cells or not inspect.isfunction(self.function):
            return None  # what it closes over may change without its source changing
        return _digest(self.function, (self.name, sorted(self.graphs), self.function.__defaults__))


def graph_pass(
    function: Callable[[fx.GraphModule], bool] | None = None,
    *,
    name: str | None = None,
    graphs: Iterable[GraphKind] = ("joint", "inference"),
) -> FunctionPass | Callable[[Callable[[fx.GraphModule], bool]], FunctionPass]:
    """Make a pass of ``function(gm) -> bool`` (whether it changed something).

    Args:
        function: the rewrite; left out when used as a decorator with arguments.
        name: the pass's name; the function's by default.
        graphs: the kinds of graph that the function takes.

    Raises:
        ValueError: for a kind of graph that does not exist.
    """
    kinds = frozenset(graphs)
    if unknown := kinds - set(get_args(GraphKind)):
        raise ValueError(
            f"graph_pass: unknown graphs {sorted(unknown)}; choose from {', '.join(get_args(GraphKind))}"
        )
    if function is None:
        return lambda f: FunctionPass(function=f, name=name or f.__name__, graphs=kinds)
    return FunctionPass(function=function, name=name or function.__name__, graphs=kinds)


def _digest(definition: type | Callable[..., object], options: object) -> str | None:
    module = inspect.getmodule(definition)
    try:
        source = inspect.getsource(module) if module is not None else None
    except OSError:
        source = None
    if source is None:
        return None
    if dataclasses.is_dataclass(options) and not isinstance(options, type):
        options = [(f.name, getattr(options, f.name)) for f in dataclasses.fields(options)]
    text = f"{definition.__module__}.{definition.__qualname__}\n{options!r}\n{source}"
    # The default repr of an object holds its address: it says nothing about its value.
    return None if " at 0x" in repr(options) else hashlib.sha256(text.encode()).hexdigest()
