"""Answers of lean nodes to questions that torch guards on, remembered once the guard is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fake import _torch as _t
from fake.symbols.state import lean_state


def _may_remember(node: Any) -> bool:
    """Whether the answer for a node is now a guard of the environment, or follows from its guards, for good."""
    shape_env = node.shape_env
    lean_state(shape_env)  # readers of remembered answers rely on it
    return (
        node._hint.__class__ in (bool, int, float)
        and not shape_env.frozen  # guards are not recorded, and what is known may be withdrawn
        and not _t.guards_are_suppressed()
        and not _t.backed_size_oblivious()
        and node.expr.free_symbols <= shape_env.backed_var_to_val.keys()
    )


def _tell(node: Any, answer: Any) -> None:
    """Mention a remembered answer to whoever listens."""
    log = lean_state(node.shape_env).log
    if log is not None:
        log.remembered(node.expr, answer)


def _memory(node: Any) -> dict[str, Any]:
    """Returns the dict that keeps answers about an expression: all copies of a canonical node share it."""
    return (getattr(node, "_canonical", None) or node).__dict__


def remembered(name: str, slot: str, original: Callable) -> Callable:
    """Returns a method of a lean node that answers from memory once torch's has answered.

    Args:
        name: the name of the method.
        slot: under which the answer is kept.
        original: torch's method.
    """

    def lean(self: Any, file: str, line: int) -> Any:
        memory = (self._canonical or self).__dict__
        answer = memory.get(slot)
        if answer is None:
            answer = original(self, file, line)
            if _may_remember(self) and (slot != "_expected" or answer):
                memory[slot] = answer
        elif self.shape_env._fake_lean.log is not None:
            _tell(self, answer)
        return answer

    lean.__name__ = name
    return lean


def evaluate_node(original: Callable) -> Callable:
    def evaluate(self: Any, size_oblivious: bool = False) -> Any:
        memory = _memory(self)
        if not size_oblivious and (answer := memory.get("_evaluated")) is not None:
            _tell(self, answer)
            return answer
        answer = original(self, size_oblivious)
        if not size_oblivious and _may_remember(self):
            memory["_evaluated"] = answer
        return answer

    return evaluate


def remembering_evaluation(original: Callable) -> Callable:
    """``ShapeEnv.evaluate_sym_node`` with the answers remembered on the nodes."""

    def evaluate_sym_node(
        self: Any, sym_node: Any, size_oblivious: bool = False, fallback_value: bool | None = None
    ) -> Any:
        memory = _memory(sym_node)
        answer = None if size_oblivious else memory.get("_evaluated")
        if answer is not None:
            _tell(sym_node, answer)
            return answer
        answer = original(self, sym_node, size_oblivious, fallback_value)
        if not size_oblivious and _may_remember(sym_node):
            memory["_evaluated"] = answer
        return answer

    return evaluate_sym_node
