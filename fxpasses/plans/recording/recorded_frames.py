"""The frames that Dynamo compiles during a recorded call: the model's, its resume functions, and others."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch

from fxpasses.counters import Fallback, counters
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.graph_breaks._torch_entry import INLINE, without_frame_hook, wrap_inline_call
from fxpasses.plans.graph_breaks.between import FunctionName, Functions, Stub, names_of, stub_of
from fxpasses.plans.graph_breaks.frames import (
    CALLED,
    calls_graph,
    describe_frame,
    function_of,
    nested_resume_names,
)
from fxpasses.plans.graph_breaks.resumed import ResumeFunction, resume_functions
from fxpasses.plans.recording import _torch_compiled as _t

log = logging.getLogger(__name__)

_NOTHING_COMPILED = (
    "nothing that it calls is compiled either: Dynamo breaks the graph at hooks and wrappers (fully_shard, DistributedDataParallel), and "
    "starts none in functions of torch that code in eager calls (Sequential.forward, checkpoint); read a model of fully_shard with "
    "fxpasses.distributed.shard(model), and compile other models before they are wrapped (part.compile(backend='fxpasses'))"
)


class RecordedFrames:
    """The frames of a call.

    Args:
        model: the model.
        functions: those between its graphs.

    Attributes:
        resumed: by the names of globals that Dynamo chose, the functions that the model's frame resumes with.
        called: what the first frame calls, if it does nothing else.
        why_more: why Dynamo's code for it does more than call its graph, or "".
    """

    def __init__(self, model: Any, functions: Functions) -> None:
        self._model, self._functions = model, functions
        self._compiled: list[tuple[types.CodeType, types.CodeType]] = []
        self._has_hooks = _t.has_hooks(model)  # in Python, around the frame of the function
        self._has_begun, self._other_frames = self._has_hooks, 0
        self.resumed: dict[str, ResumeFunction] = {}
        self.called: Any = None
        self.why_more = ""

    @contextmanager
    def watching(
        self, on_traced: Callable[[], None], on_compiled: Callable[[types.CodeType, types.CodeType], None]
    ) -> Iterator[None]:
        """Watch the frames that Dynamo compiles in this block. If it makes no graph of a module's first call,
        count a fallback.

        Args:
            on_traced: called when a frame was traced.
            on_compiled: called with the code of a compiled frame, and Dynamo's code for it.
        """
        before, is_first = counters.snapshot(), not self._functions
        with _t.compiled_frames(on_traced, on_compiled):
            yield
        now = counters.snapshot()
        said = now.fallbacks[len(before.fallbacks) :]
        if (
            is_first
            and (self._compiled or said)
            and (now.graphs, now.plans_used) == (before.graphs, before.plans_used)
            and all(fallback.stage == "dynamo" for fallback in said)
            and isinstance(self._model, torch.nn.Module)
            and next(self._model.parameters(), None) is not None
        ):
            fallback = Fallback("dynamo", _NOTHING_COMPILED, type(self._model).__qualname__)
            if fallback not in now.fallbacks:
                counters.add_fallback(fallback)
                log.warning("%s runs in eager: %s", fallback.location, fallback.reason)

    def instead_of(self, code: types.CodeType) -> types.CodeType | None:
        """What a function between graphs runs in place of ``code``, which Dynamo is about to compile."""
        try:
            function, _ = function_of(self._model)
        except NoPlan:
            return None
        if code is INLINE or (code is function.__code__ and not self._has_hooks):
            self._has_begun = True
            return None
        stub = stub_of(code) if self._has_begun else None
        self._other_frames += stub is None
        return None if stub is None else stub.stub_code

    def add(self, code: types.CodeType, new_code: types.CodeType) -> bool:
        """Note a frame that Dynamo has compiled but not run yet. Returns whether it is the first one.

        Args:
            code: of its function.
            new_code: what Dynamo wrote for it.
        """
        self._compiled.append((code, new_code))
        return len(self._compiled) == 1

    def wrap_resume_functions(self) -> None:
        """Let functions that the model's frame resumes with look for plans of their own."""
        ((code, new_code),) = self._compiled
        self.why_more = self.why_more or _t.why_more_than_graph(new_code)
        try:
            function, _ = function_of(self._model)
        except NoPlan:
            return
        if function.__code__ is code:
            self.resumed = resume_functions(new_code, function)
            handed, values = nested_resume_names(new_code), function.__globals__
            for name, resumed in self.resumed.items():
                if name not in handed:
                    values[name] = without_frame_hook(self._functions.resume(name, resumed), values[name])
                elif not resumed.code.co_freevars:
                    values[name] = resumed.function()

    def has_resumed_graphs(self) -> bool:
        """Whether resume functions of the model's frame have graphs. If not, the model adopts their calls."""
        return bool(self.resumed) and not self._functions.adopt_resumed()

    def is_single_frame(self) -> bool:
        """Whether Dynamo has traced the model's frame to its end, and no other."""
        return len(self._compiled) == 1 and not self.resumed

    def problem(self) -> str:
        """Why there can be no plan of the finished call, or ""."""
        if any(calls_graph(new_code) for _, new_code in self._compiled[1:]):
            return "a graph break"
        runs_others = self.is_single_frame() and self._other_frames
        return "another function runs in Python" if runs_others else ""

    def through(self) -> str:
        """The part of the model that the first frame calls, by its name in ``CALLED``, if it does nothing
        else, or ""."""
        found = (
            name for name, of in CALLED.items() if callable(self._model) and of(self._model) == self.called
        )
        return next(found, "") if self.called is not None else ""

    def describe(
        self, stubs: Sequence[Stub], read: Set[str]
    ) -> tuple[dict[str, list[str]], bytes, list[FunctionName]]:
        """The model's frame in Dynamo's code, as plain data (see :func:`describe_frame`), and the names of
        the functions that it calls.

        Args:
            stubs: the functions that it calls and that have graphs.
            read: see :func:`describe_frame`.

        Raises:
            NoPlan: it cannot be described.
        """
        function: Any = wrap_inline_call(self.called) if self.through() else function_of(self._model)[0]
        if not self._compiled or self._compiled[0][0] is not function.__code__:
            raise NoPlan("a frame of another function")
        described = describe_frame(function, self._compiled[0][1], self.resumed, read)
        return *described, names_of(stubs)
