"""Copy Dynamo's traces of repeated modules: each is traced once or twice, then copied in the graph.

Dynamo interprets the Python code of every layer of a model, instruction by instruction. What it finds depends
on the metadata of the arguments, on the state of the process, and on what it read from the module. Each such
read is a guard on a source, an expression like ``L['self'].layers[0].eps``. So if another module of the same
class is called in the same way, its trace is the same if every guard under ``layers[0]`` holds for the same
source under ``layers[1]``. The nodes are then copied with the new call's inputs, and the guards are installed
for the new sources, so that a later change there recompiles as it would have. (torch's
``nested_compile_region`` decides reuse in the same way, for functions that the user marks; it makes them
operators and installs no guards for the copies.)

A trace is trusted for copies only after its prediction for another call matched a full trace of that call.
Everything that this module does not know for certain is traced as usual.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxpasses.counters import counters
from fxpasses.dynamo import _torch
from fxpasses.dynamo.copies import copy_trace
from fxpasses.dynamo.traces import Trace, Unknown, is_confirmed, leaves_of, matched_sources

log = logging.getLogger(__name__)

_TRACES_PER_CLASS = 4


@dataclass
class Replay:
    """The traces of one compilation of a frame.

    Attributes:
        copied: how many module calls were copied.
        traced: how many module calls that could have been copied were traced.
    """

    copied: int = 0
    traced: int = 0
    _output: Any = None
    _traces: dict[type, list[Trace]] = field(default_factory=dict)
    _changed: list[Any] = field(default_factory=list)
    """Sources of objects that the traced program has mutated so far; None for an object without a source."""
    _holders: list[Any] = field(default_factory=list)
    """Dynamo's variables for the mutated objects that may hold an object created by the traced program."""
    _unguarded: int = 0
    """How many events no guard covers: mutations of such an object, and checks of an object's identity."""
    _calls: list[Any] = field(default_factory=list)
    """Sources of the modules being traced."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Copy what can be copied while Dynamo traces in this block."""
        if not _torch.CAN_REPLAY:
            yield
            return
        with _torch.watch_tracing(self._call, self._on_mutation, self._on_identity):
            yield
        counters.count("copied_calls", self.copied)
        log.debug("%d calls of modules traced, %d copied", self.traced, self.copied)

    def _begin(self, output: Any) -> None:
        if output is not self._output:  # Dynamo started or restarted
            self._output, self._traces, self._changed, self._holders = output, {}, [], []
            self.copied = self.traced = 0

    def _on_mutation(self, output: Any, item: Any, may_hold: bool) -> None:
        self._begin(output)
        if _torch.existed_before_trace(item):
            # Earlier traces read the old state of the object; later traces all read the new state. Only an
            # object reached through a call's module is a different object for another module.
            self._changed.append(item.source)
            if may_hold and not any(item is holder for holder in self._holders):
                self._holders.append(item)
            self._traces.clear()
        elif self._holders and _torch.is_reached(output, self._holders, item):
            self._unguarded += 1
            self._traces.clear()

    def _on_identity(self, variable: Any) -> None:
        # An object that is not reached through the call's module is the same object for another module.
        if variable.source and any(_torch.derives_from(variable.source, called) for called in self._calls):
            self._unguarded += 1

    def _is_changed(self, module: Any) -> bool:
        return any(source is None or _torch.derives_from(source, module.source) for source in self._changed)

    def _call(
        self, trace: Callable[..., Any], module: Any, tx: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        """Copy an earlier trace that fits this module call, or else trace the call and keep the trace."""
        self._begin(tx.output)
        if not _torch.plain_module(module) or not module.source or not module.value._modules:
            return trace(module, tx, args, kwargs)
        try:
            state = _torch.global_state(tx)
            is_replayable = state and not self._is_changed(module)
            leaves = list(leaves_of(tx, [module, *args], kwargs)) if is_replayable else None
        except Unknown as reason:
            log.debug("%s is traced: %s", type(module.value).__name__, reason)
            leaves = None
        if state is None or leaves is None:
            return trace(module, tx, args, kwargs)
        known = self._traces.get(type(module.value), [])
        fitting = ((t, matched_sources(t, tx, leaves, state, self._changed)) for t in reversed(known))
        found, moved = next(((t, moved) for t, moved in fitting if moved is not None), (None, None))
        if found is not None and moved is not None and found.confirmed:
            copied = copy_trace(found, tx, module, leaves, moved)
            if copied is not None:
                self.copied += 1
                return copied
        last, before = _last_node(tx), (state, _torch.trace_counters(tx), len(self._changed), self._unguarded)
        self._calls.append(module.source)
        try:
            result = trace(module, tx, args, kwargs)
        finally:
            self._calls.pop()
        self.traced += 1
        after = (_torch.global_state(tx), _torch.trace_counters(tx), len(self._changed), self._unguarded)
        if before == after and tx.output is self._output:
            made = Trace(leaves, state, _nodes_after(tx, last), result)
            if found is not None:
                found.confirmed = is_confirmed(found, tx, made)
                made.confirmed = found.confirmed
            if found is None or not found.confirmed:
                known = self._traces.setdefault(type(module.value), [])
                known.append(made)
                del known[:-_TRACES_PER_CLASS]
        return result


def _last_node(tx: Any) -> fx.Node:
    return next(iter(reversed(tx.output.graph.nodes)), tx.output.graph._root)


def _nodes_after(tx: Any, node: fx.Node) -> list[fx.Node]:
    """The nodes after one, without graph inputs that were inserted before it."""
    found = []
    node = node.next
    while node is not tx.output.graph._root:
        if node.op != "placeholder":
            found.append(node)
        node = node.next
    return found
