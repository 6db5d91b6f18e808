"""The verbose log: logger ``compiled_autograd``, enabled by ``config.verbose`` or ``TORCH_LOGS``."""

import logging
from typing import Any

from compiled_autograd import _torch
from compiled_autograd.config import config

log = logging.getLogger("compiled_autograd")


def verbose() -> bool:
    """Whether to log every hit and miss."""
    return config.verbose or _torch.torch_verbose_logging()


def cpp_logger() -> logging.Logger | None:
    """Return the logger for C++'s cache-miss messages, or None if they are off (they slow C++ down)."""
    return log if verbose() else None


def _emit(message: str, *args: Any) -> None:
    # The user asked for this log, so emit it regardless of the root logger's level.
    log.log(max(logging.INFO, log.getEffectiveLevel()), message, *args)


def log_capture(record: Any) -> None:
    """Log a cache miss: its reason, the nodes in execution order, and the graph's code."""
    if not verbose():
        return
    _emit("cache miss: %s", record.reason)
    for name, index in record.numbered_nodes:
        _emit("%s (NodeCall %d)", name, index)
    _emit("captured in %.1f ms:\n%s", record.seconds * 1e3, record.graph.code)


def log_hit(graph: Any) -> None:
    """Log a cache hit."""
    if verbose():
        _emit("cache hit: %s", graph.title)


def log_compile(title: str, what: str) -> None:
    """Log that a graph, or part of it, was compiled, or why not."""
    if verbose():
        _emit("%s: %s", title, what)


def log_fallback(reason: str) -> None:
    """Log a backward pass that runs in eager."""
    if verbose():
        _emit("runs in eager: %s", reason)
