"""A captured backward pass in the cache: its graph and its compiled forms."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from compiled_autograd import _torch
from compiled_autograd.capture.aot import reason_to_call
from compiled_autograd.capture.build import build_graph
from compiled_autograd.capture.cache_misses import Shape, miss_reason
from compiled_autograd.capture.captured_steps import CapturedNode
from compiled_autograd.capture.recorder import Capture
from compiled_autograd.config import config
from compiled_autograd.program import cudagraphs
from compiled_autograd.program.program import build_program
from compiled_autograd.runtime import functional
from compiled_autograd.runtime.executing import executable
from compiled_autograd.session.compilers import Compiler
from compiled_autograd.session.log import log_compile
from compiled_autograd.session.session import sessions
from compiled_autograd.stats import CaptureRecord
from fake.tracing.compiling import one_at_a_time


class CapturedGraph:
    """One entry of the C++ cache. C++ requires it to be callable, and returns it on every hit.

    C++ never frees it, so it must not hold tensors, hooks or autograd nodes.
    """

    def __init__(self, capture: Capture, nodes: Sequence[CapturedNode], module: fx.GraphModule) -> None:
        self.module = module
        self.num_outputs = len(capture.outputs)
        shape = Shape(capture.nodes, capture.input_metadata)
        reason, node = miss_reason(shape, [record.shape for record in sessions.records.captures])
        numbered = tuple((node.name, node.index) for node in nodes)
        seconds = time.perf_counter() - capture.started
        self.record = CaptureRecord(
            module, reason, node, numbered, seconds, shape, tuple(capture.inlined), tuple(capture.called)
        )
        """Why the pass was captured."""
        self.needs_engine = any(
            step.target is functional.call_cpp_pre_hook for node in nodes for step in node.steps
        )
        self.title = f"{len(nodes)} autograd nodes"
        self._deterministic = capture.deterministic
        self._with_calls = _Form(functools.partial(build_graph, capture, nodes, inline=False))
        self._as_captured = _Form(lambda: module)
        self._programs: dict[Any, Callable[..., Sequence[Any]]] = {}

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        return self._form().run(*arguments)

    def _form(self) -> "_Form":
        """Return the graph for the current settings: as captured, or with calls of compiled functions."""
        if not self.record.inlined:
            return self._as_captured
        reason = reason_to_call(self._deterministic)
        if reason is None:
            return self._as_captured
        sessions.records.add_called(reason, len(self.record.inlined))
        return self._with_calls

    def program(
        self, compiler: Compiler, dynamic: bool, arguments: tuple[Any, ...]
    ) -> Callable[..., Sequence[Any]]:
        """Return what to call with ``arguments``. The first pass that needs this form compiles it.

        A pass whose result is differentiated again runs as captured: a compiled form has no autograd history.

        Args:
            compiler: the user's compiler.
            dynamic: whether sizes that change become symbolic.
            arguments: the inputs, sizes, scalars, hooks and packed values, as C++ passed them.

        Returns:
            A function of the five arguments that returns the gradients.
        """
        form = self._form()
        if torch.is_grad_enabled():
            return form.run
        if config.cudagraphs or _torch.cudagraphs_enabled():
            self._prepare_for_cuda_graphs(form.module, arguments[0])
        key = (compiler.key, dynamic, form)
        program = self._programs.get(key)
        if program is None:
            with one_at_a_time:
                program = self._programs.get(key)
                if program is None:
                    program = self._programs[key] = build_program(form.module, compiler, dynamic)
        return program

    def _prepare_for_cuda_graphs(self, module: fx.GraphModule, inputs: list[Any]) -> None:
        scalars = cudagraphs.liftable_scalars(module, inputs)
        if scalars:
            device = next(t.device for t in inputs if isinstance(t, torch.Tensor) and t.device.type == "cuda")
            cudagraphs.lift_scalars(inputs, scalars, device)
        reason = cudagraphs.skip_reason(module, inputs)
        if reason is not None:
            log_compile(self.title, f"no CUDA graph: {reason}")


class _Form:
    """One form of a pass's graph, built on first use."""

    def __init__(self, make: Callable[[], fx.GraphModule]) -> None:
        self._make = make

    @functools.cached_property
    def module(self) -> fx.GraphModule:
        return self._make()

    @functools.cached_property
    def run(self) -> Callable[..., Sequence[Any]]:
        """The uncompiled graph, as a callable."""
        return executable(self.module)
