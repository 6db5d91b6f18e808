"""Private ``torch.fx`` names for long graphs: nodes in 3 us instead of 14, lazy code (torch 2.11 to 2.15)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from fake.seam.fx import LazyGraphModule as _LazyGraphModule

_NOTHING: Mapping[str, Any] = {}


class NodeWriter:
    """Appends nodes to a graph that no module owns yet, with the names that ``Graph.create_node`` would give.

    ``create_node`` is slower: it searches all arguments for symbolic numbers and parses every name twice.
    """

    def __init__(self, graph: fx.Graph) -> None:
        assert graph.owning_module is None, "a graph with an owner may have hooks that want to see its nodes"
        self.graph = graph
        self._names: Any = graph._graph_namespace
        self._used_names: set[str] = self._names._used_names
        self._name_of: dict[object, str] = self._names._obj_to_name
        self._by_target: Any = graph._find_nodes_lookup_table.table
        self._insert = graph._insert
        self._counts: dict[str, int] = {}

    def call(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        name: str,
        kwargs: Mapping[str, Any] = _NOTHING,
    ) -> fx.Node:
        """Append a ``call_function`` node.

        Args:
            target: the function to call.
            args: nodes and constants, no symbolic numbers.
            name: the base of the node's name, which may get a numeric suffix.
            kwargs: like ``args``.
        """
        return self._append("call_function", target, args, name, kwargs)

    def copy(self, node: fx.Node, value_of: Callable[[fx.Node], Any]) -> fx.Node:
        """Append a copy of a node of another graph, with its ``meta``."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of)
        made = self._append(node.op, node.target, args, node.name, kwargs)
        made.meta.update(node.meta)
        return made

    def _append(self, op: str, target: Any, args: Any, base: str, kwargs: Mapping[str, Any]) -> fx.Node:
        graph, name = self.graph, self._name(base)
        node = fx.Node(graph, name, op, target, args, kwargs)  # type: ignore[arg-type]
        self._name_of[node] = name
        self._insert(node)
        self._by_target[op, target if op == "call_function" else None][node] = None
        graph._len += 1
        return node

    def _name(self, base: str) -> str:
        used = self._used_names
        if base not in used:
            if base[-1:].isdigit() and base.isidentifier():  # no keyword and no builtin ends with a digit
                used.add(base)
                return base
            return self._names.create_name(base, None)  # type: ignore[no-any-return]
        stem, _, digits = base.rpartition("_")
        if stem and digits.isdigit():  # a suffix from another graph: continue the count of this graph
            return self._names.create_name(base, None)  # type: ignore[no-any-return]
        count = self._counts.get(base, 0) + 1
        while (name := f"{base}_{count}") in used:
            count += 1
        self._counts[base] = count
        used.add(name)
        return name


class _Forward:
    """Replaces ``forward``: accessing it on a module generates the code first."""

    def __get__(self, module: Any, owner: Any) -> Any:
        if module is None:
            return self
        module.real_recompile()
        return module.forward


_FORWARD: Any = _Forward()


class LazyGraphModule(_LazyGraphModule):
    """A `torch.fx.GraphModule` that generates code when first read, called, or asked for ``forward``.

    Torch's own version generates code when ``forward`` is called, which Dynamo cannot trace.
    """

    forward = _FORWARD

    @classmethod
    def recompile(cls) -> None:  # type: ignore[override]
        """Regenerate the code on next use."""
        cls.forward = _FORWARD

    @classmethod
    def _needs_recompile(cls) -> bool:
        return cls.forward is _FORWARD


def has_plain_code(module: fx.GraphModule) -> bool:
    """Whether a module's code would be exactly that of its graph."""
    codegen = type(module.graph._codegen)
    return (
        isinstance(module, LazyGraphModule) and "forward" not in vars(module) and codegen is fx.graph.CodeGen
    )
