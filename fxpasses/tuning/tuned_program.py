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
from fxpasses.tuning.kept import Kept, Place, add_to_report
from fxpasses.tuning.measuring import own_inputs
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
    place: Place

    def compiled(self, inputs: Sequence[Any], options: Options | None = None) -> Callable[..., Any]:
        """Compile the graph for inputs, fake or real, with these options or the user's."""
        options = options or self.options
        if not options.inductor.get("freezing") or self.options.inductor.get("freezing"):
            return self.compile(self.gm, inputs, options)
        return FrozenProgram(self.gm, options, self._compile_alone)

    def compiled_in_a_call(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile the default for the inputs of a call."""
        return self._compile_alone(self.gm, inputs, self.options)

    def _compile_alone(
        self, gm: fx.GraphModule, inputs: Sequence[Any], options: Options
    ) -> Callable[..., Any]:
        with recorded_by(None):
            return self.compile(gm, inputs, options)


@dataclass(eq=False)
class TunedProgram:
    """The program of a choice, until it fails.

    Attributes:
        graph: the graph.
        kept: the kept result of tuning.
        choice: its steps.
        checked: whether the choice was compared with eager on inputs of these sizes.
        running: the program; ``None`` once it is struck.
        default: the program without the choice, if it is compiled.
    """

    graph: Graph
    kept: Kept
    choice: Choice
    checked: bool
    running: Callable[..., Any] | None = None
    default: Callable[..., Any] | None = None
    _symbolic: bool = False
    _is_watched: bool = False

    def compiled(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return what the backend returns. Args: the inputs that Dynamo gave."""
        self._symbolic = any(isinstance(value, torch.SymInt) for value in inputs)
        if self._symbolic:
            self.choice = Choice(
                tuple(step for step in self.choice.steps if step != FREEZING)
            )  # freezing needs fixed sizes
        if not self.choice.steps:
            return self.graph.compiled(inputs)
        try:
            self.running = self.graph.compiled(inputs, self.choice.options(self.graph.options))
        except StageError as error:
            self._strike(str(error))
            return self.graph.compiled(inputs)
        recording = recorder()
        if recording is None or FREEZING not in self.choice.steps:
            return self
        recording.observer()  # the rest compiles on its first run, and checks its weights in each call
        return recording.watched(self, in_memory=True)

    def __call__(self, *inputs: Any) -> Any:
        running = self.running
        if running is None:
            return self._without(inputs)
        try:
            if not self.checked:
                self._check(running, inputs)
        except Exception as error:  # noqa: BLE001  (raised again if the default raises it as well)
            saved = self._instead(inputs)  # raises the same error if the choice is not to blame
            self._strike(str(error) if isinstance(error, _Wrong) else describe_error(error))
            return saved
        try:
            return running(*inputs) if self._is_watched else self._watched(running, inputs)
        except Exception as error:
            changes = self._changes(inputs)  # raises the same error if the choice is not to blame
            self._strike(describe_error(error))
            if changes:
                error.add_note(told_struck(self.graph.place.graph, str(self.choice), "which"))
                raise
        return self._instead(inputs)

    def _changes(self, inputs: Sequence[Any]) -> bool:
        """Whether the graph mutates its inputs, which is tried in eager on copies.

        If so, the failed program may already have mutated them, and the call is not repeated.
        """
        with torch.random.fork_rng(), torch.no_grad():
            given = [v.detach() if isinstance(v, Tensor) else v for v in own_inputs(inputs)]
            tensors = [value for value in given if isinstance(value, Tensor)]
            before = [value._version for value in tensors]
            self.graph.gm.forward(*given)
        return before != [value._version for value in tensors]

    def _watched(self, running: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Run a call, and strike the choice if its backward pass, or that of a later call, fails."""
        watch = watch_backward(inputs, self._backward_failed)
        outputs = running(*inputs)
        self._is_watched = not torch.is_grad_enabled() or watch(outputs)
        return outputs

    def _backward_failed(self, error: Exception) -> None:
        """Strike the choice, and leave the error to the user. Later calls run without the choice.

        The call cannot be repeated: its forward pass is over, and the tensors it saved may be gone.
        """
        if self.running is not None:
            error.add_note(told_struck(self.graph.place.graph, str(self.choice), "whose backward pass"))
            self._strike(f"in the backward pass: {describe_error(error)}")

    def _instead(self, inputs: Sequence[Any]) -> Any:
        """Run the call in which the program failed without the choice."""
        return (self.default or self.graph.gm.forward)(*inputs)

    def _without(self, inputs: Sequence[Any]) -> Any:
        """Run later calls. Symbolic graphs are not compiled: that would fit the sizes of one call only."""
        if self.default is None and not self._symbolic:
            self.default = self.graph.compiled_in_a_call(inputs)
        return self._instead(inputs)

    def _check(self, running: Callable[..., Any], inputs: Sequence[Any]) -> None:
        """Compare with eager once, because the choice was checked for other sizes."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng())
            given = own_inputs(inputs)
            gm, options = self.graph.gm, self.graph.options
            verdicts = Verdicts(gm, given, options, lambda o: self.graph.compiled(given, o))
            end = verdicts.compared(self.choice, running)
        if not end.ok:
            raise _Wrong(f"not what eager gives: {end.problems[0]}")
        self.checked = True
        if not self._symbolic:
            place = self.graph.place
            place.write(replace(self.kept, graph=place.graph, entries=()))

    def _strike(self, why: str) -> None:
        self.running = None
        place, options = self.graph.place, self.graph.options
        struck = self.kept.struck_for(place.graph, why)
        strike(place.file, struck)
        if options.report:
            add_to_report(options.report, struck)


class _Wrong(Exception):
    """The results of a tuned program differ from eager."""
