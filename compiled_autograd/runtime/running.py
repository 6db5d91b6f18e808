"""What is running on this thread: the stack of backward passes, captured and eager."""

import dataclasses
import itertools
import threading
from collections.abc import Callable
from typing import Any, Protocol

from compiled_autograd.runtime.node_order import WalkedNode


@dataclasses.dataclass(frozen=True, slots=True)
class LateNodeHook:
    """A hook that user code added to some autograd node while a captured pass ran."""

    hooks: Any
    """The dict in which the node keeps it."""
    handle: Any
    node: int
    """Index of the node that ran at the time."""
    phase: str


class BackwardPass(Protocol):
    """The part of a captured backward pass that functions in its graph ask for."""

    graph_task_id: int
    keep_graph: bool
    callbacks: list[Callable[[], None]]
    node: int
    phase: str
    removed_hooks: list[tuple[Any, int, str]]
    saved_hooks_changes: list[Any]
    late_node_hooks: list[LateNodeHook]

    def refuse_late_hooks(self) -> None:
        """Raise where a hook in ``late_node_hooks`` belongs to a node that this pass has yet to reach."""

    def walk(self) -> list[WalkedNode]:
        """The nodes of this pass, by the index that C++ gave them."""

    def execution_order(self) -> list[int]:
        """Indices of the nodes in the order in which they run."""


EAGER = object()
"""Stands, on the stack, for a backward pass that torch's own engine runs."""

# Far above the ids of the engine's own graph tasks, so that the two never meet.
_graph_task_ids = itertools.count(1 << 40)


class Running(threading.local):
    """The stack of this thread; innermost last."""

    def __init__(self) -> None:
        self.stack: list[Any] = []

    @staticmethod
    def new_graph_task_id() -> int:
        return next(_graph_task_ids)

    def captured(self) -> BackwardPass | None:
        """The innermost pass, where it is a captured one."""
        if self.stack and self.stack[-1] is not EAGER:
            return self.stack[-1]
        return None

    def hook_removed(self, hook: Any) -> None:
        """User code took a hook away: no running pass may call it any more."""
        for current in self.stack:
            if current is not EAGER:
                current.removed_hooks.append((hook, current.node, current.phase))

    def enter(self, node: int, phase: str = "", hook: Any = None) -> bool:
        """Note that ``phase`` of node ``node`` runs; False where ``hook`` was removed and must not be called.

        Eager reads the hooks of one phase of one node at once: a hook that another one of them removes still
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
