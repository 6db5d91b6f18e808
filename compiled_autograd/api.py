"""``enable``, ``disable``, ``reset``, ``stats``."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from compiled_autograd import _torch, queries
from compiled_autograd.engine import CapturingEngine
from compiled_autograd.running import EAGER, running
from compiled_autograd.session import Installation, Session, sessions
from compiled_autograd.stats import Stats

__all__ = ["disable", "enable", "reset", "stats"]


def _install() -> Callable[[], None]:
    before = _torch.set_current_engine(CapturingEngine())
    _torch.set_graph_task_queries(
        _current_graph_task_id=queries.current_graph_task_id,
        _current_autograd_node=queries.current_autograd_node,
        _current_graph_task_execution_order=queries.current_graph_task_execution_order,
        _will_engine_execute_node=queries.will_execute,
    )

    def uninstall() -> None:
        _torch.set_current_engine(before)
        _torch.set_graph_task_queries(
            _current_graph_task_id=_torch.current_graph_task_id,
            _current_autograd_node=_torch.current_autograd_node,
            _current_graph_task_execution_order=_torch.current_graph_task_execution_order,
            _will_engine_execute_node=_torch.will_engine_execute_node,
        )

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
