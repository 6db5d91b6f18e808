"""Explain why a backward pass could not reuse an earlier graph: find what differs from the nearest one.

Python cannot read the keys that C++ compares. Instead, captures are compared by what those keys depend on:
the nodes in C++'s order, their classes, constants, hooks, the kind of the tensors they use, and their edges.
"""

import collections
from collections.abc import Iterable, Sequence
from typing import Any

from compiled_autograd.capture.captured_steps import CapturedNode, InputValue, Step, SumValue, Value


class Shape:
    """The structure of a capture, for comparison with later ones. Holds no tensors and no hooks."""

    def __init__(self, nodes: Sequence[CapturedNode], input_metadata: Sequence[tuple[Any, ...]]) -> None:
        self.nodes = nodes
        self.input_metadata = input_metadata

    def common_prefix(self, other: "Shape") -> int:
        """Return the length of the common prefix of nodes, from the root on."""
        count = 0
        for mine, theirs in zip(self.nodes, other.nodes, strict=False):
            if self.difference(mine, other, theirs) is not None:
                break
            count += 1
        return count

    def difference(self, mine: CapturedNode, other: "Shape", theirs: CapturedNode) -> str | None:
        """Describe what differs between a node of this capture and one of another. None if nothing does.

        Args:
            mine: the node of this capture.
            other: the other capture.
            theirs: its node at the same index.
        """
        if mine.name != theirs.name:
            return f"it is new; the nearest earlier graph has {theirs.name} there"
        if mine.function_id != theirs.function_id:
            return "its custom Function is another class"
        hooks, their_hooks = _hook_counts(mine), _hook_counts(theirs)
        if hooks != their_hooks:
            return f"its hooks are {_format_hook_counts(hooks)}, were {_format_hook_counts(their_hooks)}"
        if len(mine.steps) != len(theirs.steps):
            return f"it takes {len(mine.steps)} steps, took {len(theirs.steps)}"
        for step, their_step in zip(mine.steps, theirs.steps, strict=True):
            found = self._step_difference(step, other, their_step)
            if found is not None:
                return found
        return None

    def _step_difference(self, step: Step, other: "Shape", their_step: Step) -> str | None:
        if step.label != their_step.label:
            return f"it calls {step.label}, called {their_step.label}"
        for position, (argument, before) in enumerate(zip(step.args, their_step.args, strict=False)):
            found = self._argument_difference(argument, other, before)
            if found is not None:
                return f"argument {position} of {step.label}: {found}"
        return None

    def _argument_difference(self, argument: Any, other: "Shape", before: Any) -> str | None:
        if isinstance(argument, (list, tuple)) and isinstance(before, (list, tuple)):
            if len(argument) != len(before):
                return f"has {len(argument)} elements, had {len(before)}"
            pairs = (self._argument_difference(a, other, b) for a, b in zip(argument, before, strict=True))
            return next((found for found in pairs if found is not None), None)
        if isinstance(argument, InputValue) and isinstance(before, InputValue):
            return self._input_difference(argument, other, before)
        if isinstance(argument, InputValue) and argument.source == "sizes" and isinstance(before, int):
            return f"size {before} changed and became symbolic"
        if type(argument) is not type(before):
            return f"is {_describe(argument)}, was {_describe(before)}"
        if isinstance(argument, Value):
            mine, theirs = (argument.step.node, argument.index), (before.step.node, before.index)
            return None if mine == theirs else "comes from another node"
        if isinstance(argument, SumValue):
            return self._argument_difference(argument.parts, other, before.parts)
        if argument != before and not (argument != argument and before != before):
            return f"is {_describe(argument)}, was {_describe(before)}"
        return None

    def _input_difference(self, argument: InputValue, other: "Shape", before: InputValue) -> str | None:
        if argument.source != before.source:
            return f"is one of {argument.source}, was one of {before.source}"
        if argument.source == "inputs":
            mine, theirs = self.input_metadata[argument.index], other.input_metadata[before.index]
            for name, now, then in zip(("dtype", "device", "requires_grad"), mine, theirs, strict=True):
                if now != then:
                    return f"{name} is {now}, was {then}"
        if argument.index != before.index:
            return (
                f"is element {argument.index} of {argument.source}, was {before.index}: there are more or fewer "
                "before it (a .grad that exists by now counts)"
            )
        return None


def _hook_counts(node: CapturedNode) -> dict[str, int]:
    return dict(
        collections.Counter(step.label for step in node.steps if step.label.endswith(("_hook", "unpack")))
    )


def _format_hook_counts(hooks: dict[str, int]) -> str:
    return ", ".join(f"{count} {label}" for label, count in hooks.items()) or "none"


def _describe(argument: Any) -> str:
    if isinstance(argument, (InputValue, Value, SumValue)):
        return "a gradient" if not isinstance(argument, InputValue) else f"one of {argument.source}"
    text = repr(argument)
    return text if len(text) <= 60 else text[:57] + "..."


def miss_reason(new: Shape, earlier: Iterable[Shape]) -> tuple[str, str | None]:
    """Return (reason, name of the first node that differs) for a capture, given all earlier ones."""
    nearest, prefix = None, -1
    for shape in earlier:
        common = new.common_prefix(shape)
        if common >= prefix:  # prefer the latest of equals
            nearest, prefix = shape, common
    if nearest is None:
        return "the first capture", None
    if prefix < min(len(new.nodes), len(nearest.nodes)):
        node = new.nodes[prefix]
        found = new.difference(node, nearest, nearest.nodes[prefix])
        return f"{node.name} (NodeCall {node.index}): {found}", node.name
    if len(new.nodes) != len(nearest.nodes):
        node = new.nodes[min(prefix, len(new.nodes) - 1)]
        return (
            f"{node.name} (NodeCall {node.index}): the pass has {len(new.nodes)} nodes, had {len(nearest.nodes)}",
            (node.name),
        )
    return (
        "nothing that Python can see differs from an earlier capture (an attribute that only C++ knows)",
        None,
    )
