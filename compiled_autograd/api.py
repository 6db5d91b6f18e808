"""``enable``, ``disable``, ``reset``, ``stats``."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from compiled_autograd import _torch, queries, saved_hooks
from compiled_autograd.engine import CapturingEngine
from compiled_autograd.running import EAGER, running
from compiled_autograd.session import Installation, Session, sessions
from compiled_autograd.stats import Stats

__all__ = ["disable", "enable", "reset", "stats"]


def _install() -> Callable[[], None]:
    before = _torch.set_current_engine(CapturingEngine())
    unwatch = _torch.watch(
        current_graph_task_id=queries.current_graph_task_id,
        current_autograd_node=queries.current_autograd_node,
        execution_order=queries.current_graph_task_execution_order,
        will_execute=queries.will_execute,
        push_saved_hooks=saved_hooks.push,
        pop_saved_hooks=saved_hooks.pop,
        remove_hook=queries.remove_hook,
    )

    def uninstall() -> None:
        unwatch()
        _torch.set_current_engine(before)

    return uninstall


_installation = Installation(_install)


@contextlib.contextmanager
def enable(compiler_fn: Any, dynamic: bool = True) -> Iterator[None]:
    """Capture and compile every backward pass."""
    session = Session(compiler_fn, dynamic)
    _installation.acquire()
    sessions.stack.append(session)
    try:
        yield
    finally:
        sessions.stack.pop()
        _installation.release()


@contextlib.contextmanager
def disable() -> Iterator[None]:
    """Run backward passes in eager."""
    sessions.stack.append(None)
    try:
        yield
    finally:
        sessions.stack.pop()


def reset() -> None:
    """Forget all captured graphs and all counts."""
    _torch.clear_cache()
    sessions.ledger.clear()


def stats() -> Stats:
    """Counts."""
    return sessions.ledger.stats()
