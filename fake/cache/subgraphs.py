"""Keys of operators that take a graph, such as ``invoke_subgraph``: a graph is keyed by its identity.

An entry is dropped with its graph, because another graph may then get the same identity.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NamedTuple

import torch

from fake.cache.key import plain_key
from fake.cache.store import Store
from fake.cache.symbolic import is_symbolic_key
from fake.seam.dispatch import (
    HigherOrderOperator,
    registered_hop_fake_fns,
    uncached_higher_order_operators,
    wrapped_subgraph,
)
from fake.seam.proxy_tensor import is_tracing
from fake.tensors.tensor import Unkeyable


def may_be_cached(func: Any) -> bool:
    """Return whether an operator that takes functions has a fake implementation that
    depends on its arguments only."""
    return (
        isinstance(func, HigherOrderOperator)
        and func in registered_hop_fake_fns
        and func not in uncached_higher_order_operators()
    )


def subgraph_key(func: Any, mode: Any, args: Any, kwargs: Any, tensor_class: type) -> tuple[Any, list[Any]]:
    """Return the key of a call, and the graphs that it names.

    Args:
        func: the higher-order operator.
        mode: the mode of the call.
        args: positional arguments, among them graph modules.
        kwargs: keyword arguments.
        tensor_class: the class of fake tensors that the engine serves.

    Raises:
        Unkeyable: an argument is a plain function (new each time, with unknown contents),
            or sizes are symbolic.
    """
    graphs: list[Any] = []

    def stand_in(value: Any) -> Any:
        if isinstance(value, types.FunctionType | types.MethodType):
            raise Unkeyable("function argument")
        if isinstance(value, dict):
            return [stand_in(item) for pair in sorted(value.items()) for item in pair]
        if isinstance(value, list | tuple):
            return [stand_in(item) for item in value]
        graph = value if isinstance(value, torch.fx.GraphModule) else wrapped_subgraph(value)
        if graph is None:
            return value
        graphs.append(graph)
        return f"{type(value).__name__} of graph {id(graph)}"

    arguments = [stand_in(value) for value in args]
    options = {name: stand_in(value) for name, value in (kwargs or {}).items()}
    key = (*plain_key(func, mode, arguments, options, tensor_class), is_tracing())
    if is_symbolic_key(key):
        raise Unkeyable("symbolic shape")
    return key, graphs


def call_when_collected(graphs: list[Any], callback: Callable[..., None], *arguments: Any) -> None:
    """Call ``callback(*arguments)`` when any of these graphs is collected."""
    for graph in graphs:
        weakref.finalize(graph, callback, *arguments).atexit = False


class NamedKey(NamedTuple):
    """The key of one entry, preceded by its operator."""

    key: tuple[Any, ...]


class CacheView(MutableMapping[Any, Any]):
    """All entries of a store as one mapping, by :class:`NamedKey`.

    Other kinds of keys coexist: where our mode replaces torch's,
    existing modes of torch keep their entries here.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._others: dict[Any, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        with self._store.lock:
            ours = [NamedKey((func, *key)) for func, table in self._store.tables.items() for key in table]
        return iter([*ours, *self._others])

    def __len__(self) -> int:
        return sum(map(len, self._store.tables.values())) + len(self._others)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, NamedKey):
            return self._others[key]
        return self._store.tables[key.key[0]][key.key[1:]]

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, NamedKey):
            raise TypeError("entries of the dispatch cache are made by dispatch")
        self._others[key] = value

    def __delitem__(self, key: Any) -> None:
        if isinstance(key, NamedKey):
            self._store.remove(self._store.tables[key.key[0]], key.key[1:])
        else:
            del self._others[key]
