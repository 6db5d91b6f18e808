"""Work of torch's tracing that has no effect, left out while it is accelerated.

The texts of the joint, forward and backward graphs are made for the structured log and for entries of AOTAutograd's
cache; without either, nobody reads them. Guards print each frame of the user's stack, with the file's name shortened
anew. And FX nodes, functionalization and Inductor's constant folding walk arguments, which are tuples and lists, with a
general walk over any container. Functionalization asks each tensor that it wraps for its device like any operator.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list

from fake.seam.patches import LEDGER, Patch, When, always
from fake.tracing import _torch as _t

__all__ = ["PATCHES", "leaves_of_arguments", "text_is_read"]


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


def _functionalize(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """``FunctionalTensorMode.__torch_dispatch__``; the device of a fake tensor is known without calling an operator."""
    if func is _DEVICE and type(args[0]) is _t.TorchFakeTensor and not args[0].fake_mode.in_kernel_invocation:
        return args[0].fake_device
    return _FUNCTIONALIZE(self, func, types, args, kwargs)


_FUNCTIONALIZE = _t.FunctionalTensorMode.__torch_dispatch__
_DEVICE = torch.ops.prim.device.default


class _QuickPytree:
    """Stands for the module ``torch.utils._pytree`` in modules of torch, with quicker walks over arguments."""

    def __init__(self) -> None:
        self.tree_iter = leaves_of_arguments
        self.tree_map_only = map_arguments
        self.tree_map_only_ = visit_arguments

    def __getattr__(self, name: str) -> Any:
        return getattr(_PYTREE, name)


_PYTREE = _t._pytree
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


def map_arguments(kinds: Any, function: Callable[[Any], Any], tree: Any, is_leaf: Any = None) -> Any:
    """``tree_map_only`` for arguments and results of operators.

    Args:
        kinds: the types of leaves that are mapped.
        function: gives the value that replaces a leaf.
        tree: nested tuples, lists and dicts.
        is_leaf: says that a part is not looked into, as for ``tree_map``.

    >>> map_arguments(int, lambda number: number + 1, (1, [2, "a"]))
    (2, [3, 'a'])
    """
    if is_leaf is not None or not isinstance(kinds, (type, tuple)):
        return _PYTREE.tree_map_only(kinds, function, tree, is_leaf=is_leaf)

    def mapped(value: Any) -> Any:
        kind: Any = type(value)
        if kind is tuple:
            return tuple([mapped(item) for item in value])
        if kind is list:
            return [mapped(item) for item in value]
        if kind in _LEAVES or _is_tensor_class(kind):
            return function(value) if isinstance(value, kinds) else value
        return _PYTREE.tree_map_only(kinds, function, value)

    return mapped(tree)


def visit_arguments(kinds: Any, function: Callable[[Any], Any], tree: Any, is_leaf: Any = None) -> Any:
    """``tree_map_only_``: call a function with each leaf of the given types, and return the tree.

    Args:
        kinds: the types of leaves that are visited.
        function: what is called.
        tree: nested tuples, lists and dicts.
        is_leaf: says that a part is not looked into, as for ``tree_map``.
    """
    if is_leaf is not None or not isinstance(kinds, (type, tuple)):
        return _PYTREE.tree_map_only_(kinds, function, tree, is_leaf=is_leaf)
    for leaf in leaves_of_arguments(tree):
        if isinstance(leaf, kinds):
            function(leaf)
    return tree


@functools.cache
def _is_tensor_class(kind: Any) -> bool:
    """Whether values of a class are tensors, and so leaves, unless the class is registered as a container."""
    return issubclass(kind, torch.Tensor) and kind not in _PYTREE.SUPPORTED_NODES


_QUICK = _QuickPytree()

PATCHES = LEDGER.add(
    *(
        Patch(
            _t.graph_compile,
            name,
            _unless_nobody_reads,
            when=When.COMPILATION,
            lost="time: the text of each graph is made, also where nobody reads it",
        )
        for name in ("_log_joint_graph", "_log_fw_bw_graphs")
    ),
    *(
        Patch(
            module,
            "pytree",
            always(_QUICK),
            when=When.COMPILATION,
            lost="time: arguments of nodes are walked as any container is",
        )
        for module in _t.WALKERS_OF_ARGUMENTS
    ),
    Patch(
        _t.FunctionalTensorMode,
        "__torch_dispatch__",
        always(_functionalize),
        when=When.COMPILATION,
        lost="time: the device of each functional tensor is asked for by an operator",
    ),
    Patch(
        _t._traceback,
        "shorten_filename",
        functools.cache,
        when=When.COMPILATION,
        lost="time: the name of a file is shortened anew for each frame of each guard",
    ),
)
