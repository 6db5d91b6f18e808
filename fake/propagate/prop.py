"""``FakeTensorProp``: store the fake value of every node of an FX graph in ``node.meta["val"]``."""

from __future__ import annotations

import operator
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fake.cache.key import thread_state
from fake.cache.replacements import REPLACEMENTS
from fake.cache.symbolic import metadata_of
from fake.mode import ENGINE, FakeTensorMode
from fake.seam.dispatch import (
    DispatchKey,
    OpOverload,
    has_kernel,
    has_symbols,
    has_user_dispatch_mode,
    storage_of,
)
from fake.seam.fake_tensor import (
    FakeTensorMode as TorchFakeTensorMode,
    FakeTensorProp as TorchFakeTensorProp,
    unset_fake_temporarily,
)
from fake.seam.pytree import tree_leaves
from fake.tensors.tensor import FakeTensor, Unkeyable, is_made_here
from fake.wrong_arguments import check_type

_COMPOSITE = DispatchKey.CompositeImplicitAutograd


class NotOnTape(Exception):
    """The graph needs something that only running it node by node can provide."""


@dataclass(slots=True)
class _Record:
    """A node as it was when its value was computed."""

    node: Node
    target: Any
    args: Any
    kwargs: Any
    value: Any


class Tape:
    """The last run over a graph in a mode."""

    def __init__(self) -> None:
        self.records: list[_Record] = []
        self.state: Any = None
        self.inputs: tuple[Any, ...] = ()
        self.unusable = False

    def run(self, graph: Graph, mode: Any, inputs: tuple[Any, ...]) -> Any:
        """Bring all values up to date. Returns the value of the output node.

        Args:
            graph: the graph, which may have changed since the last run.
            mode: the mode that the values belong to.
            inputs: one value per placeholder, in order.

        Raises:
            NotOnTape: the graph cannot be run from a tape.
        """
        if self.unusable:
            raise NotOnTape
        state = (REPLACEMENTS.generation, *thread_state(mode))
        if state == self.state and self._is_current(graph, inputs):
            return self.records[-1].value
        known = {record.node: record for record in self.records} if state == self.state else {}
        self.records = _Propagation(graph, mode, inputs, known).run()
        self.state, self.inputs = state, inputs
        return self.records[-1].value

    def _is_current(self, graph: Graph, inputs: tuple[Any, ...]) -> bool:
        """Return whether graph and inputs are the same objects as in the last run,
        with its values still in place."""
        records = self.records
        if len(records) != len(graph.nodes) or len(inputs) != len(self.inputs):
            return False
        for now, before in zip(inputs, self.inputs, strict=True):
            if now is not before:
                return False
        for node, record in zip(graph.nodes, records, strict=True):
            if (
                node is not record.node
                or node.target is not record.target
                or node._args is not record.args
                or node._kwargs is not record.kwargs
                or (node.meta.get("val") is not record.value and node.op != "output")
            ):
                return False
        return True


class _Propagation:
    """A pass over a graph that recomputes only what differs from the last one."""

    def __init__(
        self, graph: Graph, mode: Any, inputs: tuple[Any, ...], previous: dict[Node, _Record]
    ) -> None:
        self.graph, self.mode, self.previous = graph, mode, previous
        self.inputs = iter(inputs)
        self.values: dict[Node, Any] = {}
        self.changed: set[Node] = set()
        """Nodes whose value is a different object than last time."""

    def run(self) -> list[_Record]:
        # Handlers run with the mode entered and off the stack, as the dispatcher calls them.
        with self.mode, unset_fake_temporarily():
            return [self._visit(node) for node in self.graph.nodes]

    def _visit(self, node: Node) -> _Record:
        value = self._value_of(node)
        if value is not _MISSING_INPUT:
            self.values[node] = value
        if node.op != "output":
            node.meta["val"] = value
        return _Record(node, node.target, node._args, node._kwargs, value)

    def _value_of(self, node: Node) -> Any:
        before = self.previous.get(node)
        if node.op == "placeholder":
            value = next(self.inputs, _MISSING_INPUT)
            if value is _MISSING_INPUT:
                value = node.args[0] if node.args else None
            return self._reuse_if_equivalent(node, before, value)
        if node.op == "output":
            return torch.fx.node.map_arg(node.args[0], self.values.__getitem__)
        if node.op != "call_function":
            raise NotOnTape
        if before is not None and self._is_unchanged(node, before):
            return before.value
        return self._reuse_if_equivalent(node, before, self._compute(node))

    def _is_unchanged(self, node: Node, before: _Record) -> bool:
        return (
            node.target is before.target
            and node._args is before.args
            and node._kwargs is before.kwargs
            and not any(used in self.changed for used in node._input_nodes)
        )

    def _reuse_if_equivalent(self, node: Node, before: _Record | None, value: Any) -> Any:
        """Return the old object if the new one is equivalent for all users:
        then nothing downstream has changed."""
        if before is not None and before.value is value:
            return value
        if (
            before is not None
            and node.op == "call_function"
            and self._is_interchangeable(node, before.value, value)
        ):
            return before.value
        self.changed.add(node)
        return value

    def _is_interchangeable(self, node: Node, old: Any, new: Any) -> bool:
        """Return whether a new value is a fresh tensor like the old one (a view must follow its new base)."""
        if not is_made_here(type(old)) or not is_made_here(type(new)):
            return False
        try:
            same = (old._interned or metadata_of(old)) is (new._interned or metadata_of(new))
        except Unkeyable:
            return False
        storage = new.untyped_storage()
        if not same or old.untyped_storage().nbytes() != storage.nbytes():
            return False
        used = tree_leaves([self.values[n] for n in node._input_nodes])
        return all(storage_of(t) != storage_of(new) for t in used if isinstance(t, torch.Tensor))

    def _compute(self, node: Node) -> Any:
        target = node.target
        args: Any = torch.fx.node.map_arg(node.args, self.values.__getitem__)
        kwargs: Any = torch.fx.node.map_arg(node.kwargs, self.values.__getitem__)
        if target is operator.getitem:
            return args[0][args[1]]
        if not isinstance(target, OpOverload) or target._schema.is_mutable:
            raise NotOnTape
        return _check_value(_call(target, self.mode, args, kwargs))


def _call(target: Any, mode: Any, args: Any, kwargs: Any) -> Any:
    """Call the handler directly if nothing above the mode would see the call,
    otherwise go through the dispatcher."""
    if has_kernel(target.name(), _COMPOSITE) or any(
        isinstance(a, torch.Tensor) and a.is_complex() for a in args
    ):
        with mode:
            return target(*args, **kwargs)
    return ENGINE.handler(target)(mode, target, (), tuple(args), kwargs)


def _check_value(value: Any) -> Any:
    """Return the value of a node if the tape can hold it, otherwise raise ``NotOnTape``."""
    for item in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(item, torch.Tensor):
            if has_symbols(item) or item.requires_grad:
                raise NotOnTape
        elif isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise NotOnTape
    return value


_MISSING_INPUT = object()


class FakeTensorProp(TorchFakeTensorProp):
    """Propagates fake tensors through a graph; later runs recompute only what changed.

    Args:
        module: the graph to propagate through.
        mode: the mode that the values belong to; defaults to a new one.

    A subclass that overrides ``run_node`` or ``call_function`` runs node by node, as torch's does. So do
    graphs with mutating operators, with symbolic sizes, or with inputs that require gradients.

    >>> import torch
    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> from fake import FakeTensorMode, FakeTensorProp
    >>> graph = make_fx(lambda x, w: (x @ w).relu())(torch.ones(2, 3), torch.ones(3, 4))
    >>> FakeTensorProp(graph, FakeTensorMode()).propagate(torch.ones(8, 3), torch.ones(3, 4))
    FakeTensor(..., size=(8, 4))
    >>> [tuple(n.meta["val"].shape) for n in graph.graph.nodes if n.op == "call_function"]
    [(8, 4), (8, 4)]
    """

    def __init__(self, module: GraphModule, mode: Any = None) -> None:
        check_type("FakeTensorProp", "module", module, GraphModule, "a torch.fx.GraphModule")
        check_type(
            "FakeTensorProp", "mode", mode, (TorchFakeTensorMode, type(None)), "a FakeTensorMode, or None"
        )
        super().__init__(module, FakeTensorMode() if mode is None else mode)

    def propagate_dont_convert_inputs(self, *args: object) -> Any:
        """Propagate from inputs that are already fake. Returns the result of the graph."""
        if not self._may_use_tape(args):
            return super().propagate_dont_convert_inputs(*args)
        graph: Any = self.module.graph
        tapes = self._mode.__dict__.get("_tapes")
        if tapes is None:
            tapes = self._mode.__dict__["_tapes"] = weakref.WeakKeyDictionary()
        tape = tapes.get(graph)
        if tape is None:
            tape = tapes[graph] = Tape()
        try:
            return tape.run(graph, self._mode, args)
        except NotOnTape:
            tape.unusable = True
            return super().propagate_dont_convert_inputs(*args)

    def _may_use_tape(self, args: tuple[object, ...]) -> bool:
        mode = self._mode
        if type(self) is not FakeTensorProp or type(mode) is not FakeTensorMode or not mode.cache_enabled:
            return False
        if mode.propagate_real_tensors or mode.cache_crosscheck_enabled or has_user_dispatch_mode():
            return False
        if not torch.is_grad_enabled():
            return not any(_is_special(a, mode) for a in args)
        return not any(
            _is_special(a, mode) or (isinstance(a, torch.Tensor) and a.requires_grad) for a in args
        )


def _is_special(value: object, mode: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return type(value) is not FakeTensor or value.fake_mode is not mode or has_symbols(value)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
