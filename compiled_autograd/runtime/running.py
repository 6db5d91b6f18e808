"""This thread's stack of running backward passes, captured and eager."""

import dataclasses
import itertools
import threading
from collections.abc import Callable
from typing import Any, Protocol

from compiled_autograd.runtime.node_order import WalkedNode


@dataclasses.dataclass(frozen=True, slots=True)
class LateNodeHook:
    """A hook that user code added to an autograd node while a captured pass ran."""

    hooks: Any
    """The dict in which the node keeps the hook."""
    handle: Any
    node: int
    """Index of the node that was running."""
    phase: str


class BackwardPass(Protocol):
    """The interface of a captured backward pass for functions in its graph."""

    graph_task_id: int
    keep_graph: bool
    callbacks: list[Callable[[], None]]
    node: int
    phase: str
    removed_hooks: list[tuple[Any, int, str]]
    saved_hooks_changes: list[Any]
    late_node_hooks: list[LateNodeHook]

    def refuse_late_hooks(self) -> None:
        """Raise if a hook in ``late_node_hooks`` belongs to a node that this pass has yet to reach."""

    def walk(self) -> list[WalkedNode]:
        """Return the nodes of this pass, by C++'s index."""

    def execution_order(self) -> list[int]:
        """Return the indices of the nodes in execution order."""


EAGER = object()
"""Marks, on the stack, a backward pass run by torch's own engine."""

# Far above the engine's own graph task ids, so that they never collide.
_graph_task_ids = itertools.count(1 << 40)


class Running(threading.local):
    """This thread's stack of passes, innermost last."""

    def __init__(self) -> None:
        self.stack: list[Any] = []

    @staticmethod
    def new_graph_task_id() -> int:
        return next(_graph_task_ids)

    def captured(self) -> BackwardPass | None:
        """Return the innermost pass if it is a captured one."""
        if self.stack and self.stack[-1] is not EAGER:
            return self.stack[-1]
        return None

    def hook_removed(self, hook: Any) -> None:
        """Record that user code removed a hook: no running pass may call it any more."""
        for current in self.stack:
            if current is not EAGER:
                current.removed_hooks.append((hook, current.node, current.phase))

    def enter(self, node: int, phase: str = "", hook: Any = None) -> bool:
        """Record that ``phase`` of ``node`` runs. False if ``hook`` was removed and must not be called.

        Eager reads the hooks of one phase of one node at once, so a hook removed by another one of them still
        runs in this pass.

        Args:
            node: its index in the graph.
            phase: which of the node's hooks run; empty for the node itself.
            hook: the hook that is about to be called.
        """
        if not self.stack or (current := self.stack[-1]) is EAGER:
            return True
        if current.late_node_hooks:
            current.refuse_late_hooks()
        current.node, current.phase = node, phase
        return not current.removed_hooks or not any(
            removed is hook and (at_node, at_phase) != (node, phase)
            for removed, at_node, at_phase in current.removed_hooks
        )

    def keeps_graph(self) -> bool:
        """Whether the running pass keeps its saved tensors (``retain_graph``)."""
        current = self.captured()
        return current is not None and current.keep_graph


running = Running()
