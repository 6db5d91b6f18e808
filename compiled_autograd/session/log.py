"""The verbose log: logger ``compiled_autograd``, switched by ``config.verbose`` or by ``TORCH_LOGS``."""

import logging
from typing import Any

from compiled_autograd import _torch
from compiled_autograd.config import config

log = logging.getLogger("compiled_autograd")


def verbose() -> bool:
    """Whether every hit and miss is to be logged."""
    return config.verbose or _torch.torch_verbose_logging()


def log_of_cpp() -> logging.Logger | None:
    """The logger for what C++ says of cache misses; None where nobody wants to read it (C++ is slower then)."""
    return log if verbose() else None


def _emit(message: str, *args: Any) -> None:
    # asking for the log is asking to see it, whatever the level of the root logger
    log.log(max(logging.INFO, log.getEffectiveLevel()), message, *args)


def log_capture(record: Any) -> None:
    """A cache miss: why, the nodes in the order in which they run, and the graph's code."""
    if not verbose():
        return
    _emit("cache miss: %s", record.reason)
    for name, index in record.numbered_nodes:
        _emit("%s (NodeCall %d)", name, index)
    _emit("captured in %.1f ms:\n%s", record.seconds * 1e3, record.graph.code)


def log_hit(graph: Any) -> None:
    """A cache hit."""
    if verbose():
        _emit("cache hit: %s", graph.title)


def log_compile(title: str, what: str) -> None:
    """A graph, or a part of it, given to the compiler, or the reason why not."""
    if verbose():
        _emit("%s: %s", title, what)


def log_fallback(reason: str) -> None:
    """A backward pass that runs in eager."""
    if verbose():
        _emit("runs in eager: %s", reason)
