"""What a capture records before it becomes an FX graph: steps, and the values that flow between them.

C++ visits nodes depth first; the engine runs them by priority. Recording steps first makes it possible to
write the graph in eager's order.
"""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any


class Kind(enum.Enum):
    """The possible effects of a step besides computing its outputs."""

    PURE = "pure"
    """No effects: a functional autograd node, validation, addition, arithmetic on sizes."""
    PYTHON = "python"
    """Any effects: a hook or a Python backward."""
    CPP = "cpp"
    """Any effects, in C++: a custom C++ function that is not marked traceable, or a C++ hook."""
    ACCUMULATE = "accumulate"
    """Sets or updates ``.grad`` of a leaf."""
    READ = "read"
    """No effects, and depends on graph arguments alone, so it runs before everything else."""


@dataclasses.dataclass(eq=False, slots=True)
class Step:
    """One call in the graph."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kind: Kind
    node: int
    """C++'s index of the autograd node that the step belongs to."""
    label: str
    takes_node: bool = False
    """Whether to pass the node's index to the target."""
    kwargs: dict[str, Any] | None = None
    meta: dict[str, Any] | None = None
    """Extra ``meta`` for its node in the graph."""
    produces: Sequence[tuple[Any, ...] | None] = ()
    """Sizes, dtype and device of each output that a custom backward may omit."""
    inlined: "Inlined | None" = None
    """The body of what it calls, if known. A graph contains either the call or the body."""


@dataclasses.dataclass(eq=False, slots=True)
class Inlined:
    """The body of a function call."""

    steps: list[Step]
    outputs: list[Any]
    """The outputs of the call; None for one that is always missing."""


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """An output of a step: all of it (index None), or one element."""

    step: Step
    index: int | None = None


@dataclasses.dataclass(unsafe_hash=True, slots=True)
class InputValue:
    """One element of an argument of the whole graph: ``inputs``, ``sizes``, ``scalars``, ``hooks``, ``packed``."""

    source: str
    index: int


@dataclasses.dataclass(eq=False, slots=True)
class Constant:
    """A tensor, or the graph argument of a higher-order operator. Becomes an attribute of the whole graph."""

    name: str
    value: Any


@dataclasses.dataclass(eq=False, slots=True)
class SumValue:
    """Gradients that flow into one input of a node, in the order in which C++ reported them."""

    parts: list[Any]
    node: int
    """The node during which C++ created it. Only used for naming."""


@dataclasses.dataclass(slots=True)
class CapturedNode:
    """One autograd node of the pass."""

    index: int
    name: str
    sequence_nr: int | None = None
    stack_trace: str | None = None
    is_python: bool = False
    function_id: int | None = None
    """Identifies the custom Function of a backward node."""
    steps: list[Step] = dataclasses.field(default_factory=list)


_VALUES = {Value, InputValue, SumValue}
_NESTED = {tuple, list, dict, slice}


def leaves(argument: Any) -> list[Any]:
    """Return the values inside nested tuples, lists, dicts and slices."""
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
