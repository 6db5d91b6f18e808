"""What a capture records before it becomes an FX graph: steps, and the values that flow between them.

The C++ side visits nodes depth first; the engine runs them by priority. Recording steps first lets the
graph be written in the order in which eager would run it.
"""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any


class Kind(enum.Enum):
    """What running a step may do besides computing its outputs."""

    PURE = "pure"
    """Nothing: a functional autograd node, validation, addition, arithmetic on sizes."""
    PYTHON = "python"
    """Anything: a hook or a Python backward."""
    CPP = "cpp"
    """Anything, in C++: a custom C++ function that is not marked traceable, or a C++ hook."""
    ACCUMULATE = "accumulate"
    """Sets or changes ``.grad`` of a leaf."""
    READ = "read"
    """Nothing, and it depends on arguments of the graph alone: it runs before everything else."""


@dataclasses.dataclass(eq=False, slots=True)
class Step:
    """One call in the graph."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kind: Kind
    node: int
    """Index of the autograd node that it belongs to, as C++ counts them."""
    label: str
    takes_node: bool = False
    """Whether the target wants to know the node's index."""
    kwargs: dict[str, Any] | None = None
    meta: dict[str, Any] | None = None
    """More for the ``meta`` of its node in the graph."""
    produces: Sequence[tuple[Any, ...] | None] = ()
    """Sizes, dtype and device of each output that a custom backward may leave out."""
    inlined: "Inlined | None" = None
    """What it calls, where that is known: a graph has either."""


@dataclasses.dataclass(eq=False, slots=True)
class Inlined:
    """The body of a called function."""

    steps: list[Step]
    outputs: list[Any]
    """What the call's outputs are; None for one that is always missing."""


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """One output of a step: all of it (index None), or one element."""

    step: Step
    index: int | None = None


@dataclasses.dataclass(unsafe_hash=True, slots=True)
class InputValue:
    """One element of an argument of the whole graph: ``inputs``, ``sizes``, ``scalars``, ``hooks``, ``packed``."""

    source: str
    index: int


@dataclasses.dataclass(eq=False, slots=True)
class Constant:
    """A tensor, or the graph that a higher-order operator takes: an attribute of the whole graph."""

    name: str
    value: Any


@dataclasses.dataclass(eq=False, slots=True)
class SumValue:
    """Gradients that flow into one input of a node, in the order in which C++ met them."""

    parts: list[Any]
    node: int
    """The node during which C++ created it; only used to name it."""


@dataclasses.dataclass(slots=True)
class CapturedNode:
    """One autograd node of the pass."""

    index: int
    name: str
    sequence_nr: int | None = None
    stack_trace: str | None = None
    is_python: bool = False
    function_id: int | None = None
    """Which custom Function it is the backward of."""
    steps: list[Step] = dataclasses.field(default_factory=list)


_VALUES = {Value, InputValue, SumValue}
_NESTED = {tuple, list, dict, slice}


def leaves(argument: Any) -> list[Any]:
    """The values inside nested tuples, lists, dicts and slices."""
    found: list[Any] = []
    if type(argument) in _VALUES:
        found.append(argument)
    else:
        _add_leaves(argument, found)
    return found


def _add_leaves(argument: Any, found: list[Any]) -> None:
    kind = type(argument)
    if kind is dict:
        argument = argument.values()
    elif kind is slice:
        argument = (argument.start, argument.stop, argument.step)
    elif kind is not tuple and kind is not list:
        return
    for element in argument:
        inner = type(element)
        if inner in _VALUES:
            found.append(element)
        elif inner in _NESTED:
            _add_leaves(element, found)
