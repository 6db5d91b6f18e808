"""The autograd engine that Python sees while capturing is enabled, and how it runs one backward pass.

`run_pass` reads top to bottom, from the call of the engine to the gradients. The C++ hook is set only while
the engine walks the nodes. The hook returns the graph and its arguments without running them; they run after
the engine has returned. So backward passes may nest, errors and tracebacks are Python's own, and a refusal
leaves nothing half done.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from compiled_autograd import _torch
from compiled_autograd.capture.build import build_graph, ordered_nodes
from compiled_autograd.capture.recorder import Capture, PassRecorder
from compiled_autograd.config import config
from compiled_autograd.errors import RefusedError, StrayPassError
from compiled_autograd.program.cached_graph import CapturedGraph
from compiled_autograd.runtime import late_hooks, node_order, queries
from compiled_autograd.runtime.running import EAGER, LateNodeHook, running
from compiled_autograd.session.fallback import eager_reason, refusal_reason
from compiled_autograd.session.log import log_capture, log_fallback, log_hit
from compiled_autograd.session.node_sessions import node_sessions
from compiled_autograd.session.session import Session, sessions
from compiled_autograd.session.walking import Handle, walks


@_torch.disable_dynamo
def run_pass(
    session: Session, engine: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run one backward pass as a graph, cached or newly captured, or else in torch's engine.

    Args:
        session: the session of the pass: its compiler, and whether sizes are symbolic.
        engine: torch's own ``run_backward``.
        args: positional arguments of ``engine``.
        kwargs: keyword arguments of ``engine``.

    Returns:
        The gradients, as the engine returns them.

    Raises:
        RefusedError: if the pass cannot be captured and ``config.fallback`` is off.
    """
    backward_pass = _Pass(session, *args, **kwargs)
    run_backward = functools.partial(engine, *args, **kwargs)
    reason = eager_reason()
    if reason is None:
        try:
            # C++ walks the nodes and finds a graph, or has one captured: `_Pass.make_recorder`,
            # `_Pass.captured`
            result = backward_pass.walk_in_engine(run_backward)
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            reason = None if backward_pass.started else refusal_reason(error)
            if reason is None:
                raise
        else:
            # There is nothing to run, or it ran inside the engine, for C++ hooks.
            if backward_pass.pending_call is None:
                return result
            outputs = backward_pass.run()  # compiles the graph, unless an earlier pass did
            if not backward_pass.allow_unreachable and any(output is None for output in outputs):
                _raise_unused(engine, outputs)
            return outputs
    if not config.fallback:
        raise RefusedError(reason)
    return _run_uncaptured(run_backward, reason)


def _run_uncaptured(run_backward: Callable[[], Any], reason: str) -> Any:
    record = sessions.records.fell_back(reason)
    log_fallback(reason)
    running.stack.append(EAGER)
    try:
        return walks.run_uncaptured(run_backward)
    finally:
        running.stack.pop()
        sessions.notify("fallback", record)


def _raise_unused(engine: Callable[..., Any], outputs: Sequence[Any]) -> None:
    """Raise this torch release's own error for the first input that has no gradient."""
    used, unused = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
    inputs = tuple(unused if output is None else used for output in outputs)
    walks.run_uncaptured(functools.partial(engine, (used,), (torch.ones(()),), False, False, inputs))


class _Pass:
    """One backward pass, from the call of the engine to its last callback."""

    def __init__(
        self,
        session: Session,
        tensors: Sequence[Any],
        grad_tensors: Sequence[Any],
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any] = (),
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> None:
        self.session = session
        self.tensors = tensors
        self.keep_graph = keep_graph
        self.create_graph = create_graph
        self.inputs = inputs
        self.allow_unreachable = allow_unreachable
        self.accumulate_grad = accumulate_grad
        self.graph_task_id = running.new_graph_task_id()
        self.callbacks: list[Callable[[], None]] = []
        self.node = 0
        self.is_new_capture = False
        self.started = False
        self.end_walk: Callable[[], None] = lambda: None
        self.pending_call: tuple[CapturedGraph, tuple[Any, ...]] | None = None
        """The graph that C++ found or had captured, with its arguments, until it runs."""
        self.graph: CapturedGraph | None = None
        self._walked: list[node_order.WalkedNode] | None = None
        self.phase = ""
        self.removed_hooks: list[tuple[Any, int, str]] = []
        self.saved_hooks_changes: list[Any] = []
        self.late_node_hooks: list[LateNodeHook] = []

    # Queried by the graph's functions and by torch._C's replaced functions

    def walk(self) -> list[node_order.WalkedNode]:
        if self._walked is None:
            self._walked = node_order.walk(self.tensors, self.inputs, self.accumulate_grad)
        return self._walked

    def execution_order(self) -> list[int]:
        assert self.graph is not None
        order = [index for _, index in self.graph.record.numbered_nodes]
        return order if len(order) == len(self.walk()) else node_order.eager_order(self.walk())

    def refuse_late_hooks(self) -> None:
        late_hooks.refuse_node_hooks(self)

    # The steps of the pass

    def walk_in_engine(self, run_backward: Callable[[], Any]) -> Any:
        """Let C++ find or capture the graph. Return the engine's result, used if it did not run our graph."""
        with walks.walking(self.make_recorder, self.session.dynamic) as self.end_walk:
            outer, _current_pass.current = _current_pass.current, self
            try:
                return run_backward()
            finally:
                _current_pass.current = outer

    def make_recorder(self) -> PassRecorder:
        """Return a recorder of this pass. C++ calls this if it has no graph for these nodes."""
        if _current_pass.current is not self:
            raise StrayPassError
        walks.pause_collector()
        return PassRecorder(self.walk, self.captured)

    def captured(self, capture: Capture) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Build the graph of a complete recording. Return what C++ stores for it."""
        nodes = ordered_nodes(capture)
        graph = CapturedGraph(capture, nodes, build_graph(capture, nodes))
        sessions.records.captured(graph.record)
        log_capture(graph.record)
        capture.walked = None  # the nodes hold hooks
        self.is_new_capture = True
        return walks.handle(_runtime_wrapper, graph, len(nodes))

    def run(self) -> Sequence[Any]:
        """Run the compiled graph, then the callbacks that were queued until the end of the pass."""
        assert self.pending_call is not None
        graph, arguments = self.pending_call
        self.graph, self.pending_call = graph, None
        if not self.is_new_capture:
            sessions.records.count("hits")
            log_hit(graph)
        self.started = True
        running.stack.append(self)
        try:
            with torch.set_grad_enabled(self.create_graph):
                program = graph.program(self.session.compiler, self.session.dynamic, arguments)
                outputs = program(*arguments)
                if self.late_node_hooks:
                    self.refuse_late_hooks()
                position = 0
                while position < len(self.callbacks):  # a callback may queue another
                    self.callbacks[position]()
                    position += 1
        finally:
            running.stack.pop()
            queries.restore_saved_hooks(self.saved_hooks_changes)
            sessions.notify("capture" if self.is_new_capture else "hit", graph.record)
        if self.accumulate_grad and not graph.needs_engine:
            return ()
        return list(outputs) if graph.needs_engine else tuple(outputs)


class _CurrentPass(threading.local):
    current: _Pass | None = None


_current_pass = _CurrentPass()


def _runtime_wrapper(
    handle: Handle, inputs: list[Any], sizes: Any, scalars: Any, hooks: Any, packed: Any
) -> Sequence[Any]:
    """Runtime wrapper that C++ calls with a cached or newly captured graph and its arguments."""
    arguments = (inputs, sizes, scalars, list(hooks), list(packed))
    current, graph = _current_pass.current, handle.graph
    if current is None:
        if walks.is_walking_elsewhere():
            raise StrayPassError
        return graph(*arguments)  # torch's own compiled autograd found our graph in the shared cache
    current.pending_call = (graph, arguments)
    if graph.needs_engine:  # C++ hooks live only as long as this call
        current.end_walk()
        return current.run()
    return [_PLACEHOLDER_GRAD] * graph.num_outputs


_PLACEHOLDER_GRAD = torch.empty(0)


@_torch.disable_dynamo
def _find_session(roots: Sequence[Any]) -> Session | None:
    """Return the session that captures a pass from these tensors, or None if torch's own engine runs it."""
    if _torch.is_tracing():
        return None
    return sessions.current() if sessions.stack else node_sessions.find(roots)


class CapturingEngine(_torch.Engine):
    """Replaces ``torch.autograd.Variable._execution_engine`` while any session is enabled.

    A backward pass inside a compiled function gets here with Dynamo's frame hook on, which would trace our
    code.
    """

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        session = _find_session(args[0])
        if session is None:
            return walks.run_uncaptured(functools.partial(super().run_backward, *args, **kwargs))
        return run_pass(session, super().run_backward, args, kwargs)

    def is_checkpoint_valid(self) -> bool:
        """Whether reentrant checkpointing works here. It does not in ``grad`` or ``backward(inputs=...)``."""
        return (
            all(passed is EAGER or not passed.inputs for passed in running.stack)
            and super().is_checkpoint_valid()
        )

    def queue_callback(self, callback: Callable[[], None]) -> None:
        current = running.captured()
        if current is None:
            super().queue_callback(callback)
        else:
            current.callbacks.append(callback)
