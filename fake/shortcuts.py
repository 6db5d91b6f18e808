"""Work of torch's tracing that has no effect, left out while it is accelerated.

The texts of the joint, forward and backward graphs are made for the structured log and for entries of AOTAutograd's
cache; without either, nobody reads them. And each new FX node searches its arguments for raw symbolic numbers, to warn
of them, with a general walk over any container.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import graph as fx_graph
from torch.fx.immutable_collections import immutable_dict, immutable_list

from . import _torch as _t

__all__ = ["leaves_of_arguments", "patches", "text_is_read"]


def patches() -> list[tuple[Any, str, Any]]:
    """Attributes of torch and what to put there (owner, name, value)."""
    compiler = _t.graph_compile
    return [
        *(
            (compiler, name, _unless_nobody_reads(getattr(compiler, name)))
            for name in ("_log_joint_graph", "_log_fw_bw_graphs")
            if hasattr(compiler, name)
        ),
        (fx_graph, "pytree", _QuickLeaves()),
    ]


def text_is_read(config: Any) -> bool:
    """Whether someone reads the text of a graph: a log, or an entry of AOTAutograd's cache."""
    return (
        config.cache_info is not None
        or _t.structured_log_is_on()
        or any(
            log.isEnabledFor(logging.INFO)
            for log in (_t.graph_compile.aot_joint_log, _t.graph_compile.aot_graphs_log)
        )
    )


def _unless_nobody_reads(original: Callable[..., Any]) -> Callable[..., Any]:
    def log(*arguments: Any) -> Any:
        config = arguments[-1]
        if not text_is_read(config):
            config = dataclasses.replace(config, enable_log=False)
        return original(*arguments[:-1], config)

    return log


class _QuickLeaves:
    """Stands for the module ``torch.utils._pytree`` in ``torch.fx.graph``, with a quicker ``tree_iter``."""

    def __init__(self) -> None:
        self.tree_iter = leaves_of_arguments

    def __getattr__(self, name: str) -> Any:
        return getattr(_PYTREE, name)


_PYTREE = fx_graph.pytree
_SEQUENCES = frozenset((tuple, list, immutable_list))
_MAPPINGS = frozenset((dict, immutable_dict))
_LEAVES = frozenset(
    (
        torch.fx.Node,
        int,
        float,
        bool,
        str,
        type(None),
        torch.dtype,
        torch.device,
        torch.memory_format,
        torch.layout,
    )
)


def leaves_of_arguments(tree: Any, is_leaf: Any = None) -> Iterator[Any]:
    """``tree_iter`` for the arguments of nodes: exact tuples, lists and dictionaries; the rest as torch does it.

    >>> list(leaves_of_arguments(((1, [2, None]), {"a": 3})))
    [1, 2, None, 3]
    """
    if is_leaf is not None:
        yield from _PYTREE.tree_iter(tree, is_leaf)
        return
    pending = [tree]
    while pending:
        value = pending.pop()
        kind = type(value)
        if kind in _SEQUENCES:
            pending.extend(reversed(value))
        elif kind in _MAPPINGS:
            pending.extend(reversed(list(value.values())))
        elif kind in _LEAVES:
            yield value
        else:
            yield from _PYTREE.tree_iter(value)
