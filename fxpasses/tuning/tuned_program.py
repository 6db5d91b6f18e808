"""A tuned program. If it fails, its choice is struck from the kept results, and the graph runs without it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from fake.error_text import describe_error
from fxpasses.compiling.observing import recorded_by, recorder
from fxpasses.compiling.options import Options
from fxpasses.errors import StageError
from fxpasses.tuning._torch import watch_backward
from fxpasses.tuning.choice import Choice
from fxpasses.tuning.freezing import FREEZING, FrozenProgram
from fxpasses.tuning.kept import ResultLocation, TuningResult, add_to_report
from fxpasses.tuning.measuring import copy_inputs
from fxpasses.tuning.struck import strike, told_struck
from fxpasses.tuning.verdicts import Verdicts

Compile = Callable[[fx.GraphModule, Sequence[Any], Options], Callable[..., Any]]
"""Compiles a Dynamo graph for inputs, fake or real, with given options."""


@dataclass(frozen=True)
class Graph:
    """A Dynamo graph, the user's options for it, its compiler, and where its results are kept."""

    gm: fx.GraphModule
    options: Options
    compile: Compile
    location: ResultLocation

    def compiled(self, inputs: Sequence[Any], options: Options | None = None) -> Callable[..., Any]:
        """Compile the graph for inputs, fake or real, with these options or the user's."""
        options = options or self.options
        if not options.inductor.get("freezing") or self.options.inductor.get("freezing"):
            return self.compile(self.gm, inputs, options)
        return FrozenProgram(self.gm, options, self._compile_unrecorded)

    def compile_default(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile the default for the inputs of a call."""
        return self._compile_unrecorded(self.gm, inputs, self.options)

    def _compile_unrecorded(
        self, gm: fx.GraphModule, inputs: Sequence[Any], options: Options
    ) -> Callable[..., Any]:
        with recorded_by(None):
            return self.compile(gm, inputs, options)


@dataclass(eq=False)
class TunedProgram:
    """The program of a choice, until it fails.

    Attributes:
        graph: the graph.
        result: the kept result of tuning.
        choice: its steps.
        checked: whether the choice was compared with eager on inputs of these sizes.
        program: the program; ``None`` once it is struck.
        default: the program without the choice, if it is compiled.
    """

    graph: Graph
    result: TuningResult
    choice: Choice
    checked: bool
    program: Callable[..., Any] | None = None
    default: Callable[..., Any] | None = None
    _has_symbolic_sizes: bool = False
    _is_watched: bool = False

    def compiled(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return what the backend returns. Args: the inputs that Dynamo gave."""
        self._has_symbolic_sizes = any(isinstance(value, torch.SymInt) for value in inputs)
        if self._has_symbolic_sizes:
            self.choice = Choice(
                tuple(step for step in self.choice.steps if step != FREEZING)
            )  # freezing needs fixed sizes
        if not self.choice.steps:
            return self.graph.compiled(inputs)
        try:
            self.program = self.graph.compiled(inputs, self.choice.options(self.graph.options))
        except StageError as error:
            self._strike(str(error))
            return self.graph.compiled(inputs)
        recording = recorder()
        if recording is None or FREEZING not in self.choice.steps:
            return self
        recording.observer()  # the rest compiles on its first run, and checks its weights in each call
        return recording.watched(self, in_memory=True)

    def __call__(self, *inputs: Any) -> Any:
        program = self.program
        if program is None:
            return self._run_default(inputs)
        try:
            if not self.checked:
                self._check(program, inputs)
        except Exception as error:  # noqa: BLE001  (raised again if the default raises it as well)
            outputs = self._run_fallback(inputs)  # raises the same error if the choice is not to blame
            self._strike(str(error) if isinstance(error, _WrongResults) else describe_error(error))
            return outputs
        try:
            return program(*inputs) if self._is_watched else self._run_watched(program, inputs)
        except Exception as error:
            mutates_inputs = self._mutates_inputs(
                inputs
            )  # raises the same error if the choice is not to blame
            self._strike(describe_error(error))
            if mutates_inputs:
                error.add_note(told_struck(self.graph.location.graph, str(self.choice), "which"))
                raise
        return self._run_fallback(inputs)

    def _mutates_inputs(self, inputs: Sequence[Any]) -> bool:
        """Whether the graph mutates its inputs, which is tried in eager on copies.

        If so, the failed program may already have mutated them, and the call is not repeated.
        """
        with torch.random.fork_rng(), torch.no_grad():
            copies = [v.detach() if isinstance(v, Tensor) else v for v in copy_inputs(inputs)]
            tensors = [value for value in copies if isinstance(value, Tensor)]
            before = [value._version for value in tensors]
            self.graph.gm.forward(*copies)
        return before != [value._version for value in tensors]

    def _run_watched(self, program: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Run a call, and strike the choice if its backward pass, or that of a later call, fails."""
        watch = watch_backward(inputs, self._on_backward_error)
        outputs = program(*inputs)
        self._is_watched = not torch.is_grad_enabled() or watch(outputs)
        return outputs

    def _on_backward_error(self, error: Exception) -> None:
        """Strike the choice, and leave the error to the user. Later calls run without the choice.

        The call cannot be repeated: its forward pass is over, and the tensors it saved may be gone.
        """
        if self.program is not None:
            error.add_note(told_struck(self.graph.location.graph, str(self.choice), "whose backward pass"))
            self._strike(f"in the backward pass: {describe_error(error)}")

    def _run_fallback(self, inputs: Sequence[Any]) -> Any:
        """Run the call in which the program failed without the choice."""
        return (self.default or self.graph.gm.forward)(*inputs)

    def _run_default(self, inputs: Sequence[Any]) -> Any:
        """Run later calls. Symbolic graphs are not compiled: that would fit the sizes of one call only."""
        if self.default is None and not self._has_symbolic_sizes:
            self.default = self.graph.compile_default(inputs)
        return self._run_fallback(inputs)

    def _check(self, program: Callable[..., Any], inputs: Sequence[Any]) -> None:
        """Compare with eager once, because the choice was checked for other sizes."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng())
            copies = copy_inputs(inputs)
            gm, options = self.graph.gm, self.graph.options
            verdicts = Verdicts(gm, copies, options, lambda o: self.graph.compiled(copies, o))
            check = verdicts.compare_with_eager(self.choice, program)
        if not check.ok:
            raise _WrongResults(f"not what eager gives: {check.problems[0]}")
        self.checked = True
        if not self._has_symbolic_sizes:
            location = self.graph.location
            location.write(replace(self.result, graph=location.graph, entries=()))

    def _strike(self, why: str) -> None:
        self.program = None
        location, options = self.graph.location, self.graph.options
        struck = self.result.struck_for(location.graph, why)
        strike(location.file, struck)
        if options.report:
            add_to_report(options.report, struck)


class _WrongResults(Exception):
    """The results of a tuned program differ from eager."""
