"""Verdicts: whether a tuned program may replace the default.

The program is compared with eager, and its rewrites are judged one by one.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxpasses.checking.comparison.rounding import PROGRAM_LIMIT
from fxpasses.checking.model import Collector, StageCheck, compare_results
from fxpasses.checking.stages.model_steps import Results, Steps
from fxpasses.compiling.options import Options
from fxpasses.pipeline.compile_graph import compile_graph
from fxpasses.pipeline.stages import Participants
from fxpasses.tuning.choice import Choice, Step

_EAGER_RANDOM = {"fallback_random": True}
"""With this Inductor option, compiled graphs draw the same random numbers as eager."""


_MAX_DISTANCE_RATIO = 2.0
"""A result is accepted if it is at most this many times as far from float64 as the default's."""


class Verdicts:
    """The checks of the programs of one graph.

    Args:
        gm: a Dynamo graph.
        inputs: real inputs for it.
        options: the user's options.
        compile: compiles ``gm`` with given options.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        options: Options,
        compile: Callable[[Options], Callable[..., Any]],
    ) -> None:
        self._gm, self._inputs, self._options, self._compile = gm, list(inputs), options, compile
        self._steps = Steps(gm, tuple(inputs), {}, torch.is_grad_enabled())
        self._eager: Results | None = None
        self._default: Results | None = None

    def refusal(self, choice: Choice, program: Callable[..., Any], seconds: float) -> tuple[str, str]:
        """Return why a program may not be used, or "", and what the checks say of it.

        Args:
            choice: what it was compiled with. Only its last step is not checked yet.
            program: takes the inputs.
            seconds: the time after which rewrites are only tried on the real inputs.
        """
        check = self.compare_with_eager(choice, program)
        if not check.ok:
            return f"not what eager gives: {check.problems[0]}", ""
        reference = "eager's" if check.times <= PROGRAM_LIMIT else "the default's"
        notes = [f"{reference} results, {check.times:.2g} x rounding" if check.times else "eager's bits"]
        computed = [v for name, v in (self._eager or {}).items() if name.startswith(("output", "gradient"))]
        if not any(bool(value.isfinite().any()) for value in computed):
            notes = ["nothing that eager gives is finite"]
        for step in choice.steps[-1:]:
            reason, verdict = self._judge_step(step, choice, seconds)
            if reason:
                return reason, ""
            notes = [verdict, *notes] if verdict else notes
        return "", "; ".join(notes)

    def compare_with_eager(self, choice: Choice, program: Callable[..., Any]) -> StageCheck:
        """Compare the results and gradients of a program with those of eager.

        A result that is no farther from float64 than the default's (see ``_MAX_DISTANCE_RATIO``) is right
        as well. Some kernels compute in another order (the gradients of batch norm).

        Args:
            choice: what it was compiled with.
            program: takes the inputs.
        """
        if self._eager is None:
            self._eager = self._steps.eager()
            self._variation = self._steps.variation(self._eager)
            self._yardsticks, _ = self._steps.reference_runs()
        comparable = choice.without_allowed()
        if self._needs_eager_random or comparable != choice:
            program = self._compile(self._options_for_comparison(comparable))
        results = self._steps.compiled(lambda step: program)
        # Apply the limits for kernels, whatever runs the graph. Verdicts on rewrites say which round worse.
        check = compare_results(f"inductor, {choice}", results, self._eager, self._yardsticks)
        if check.ok:
            return check
        if self._default is None:
            default = self._compile(self._options_for_comparison(Choice()))
            self._default = self._steps.compiled(lambda step: default)
        against_default = compare_results(check.stage, results, self._default, self._yardsticks)
        is_no_farther = against_default.ok and against_default.times <= _MAX_DISTANCE_RATIO
        return dataclasses.replace(check, problems=()) if is_no_farther else check

    @property
    def _needs_eager_random(self) -> bool:
        return bool(self._variation) and self._options.compiler == "inductor"

    def _options_for_comparison(self, choice: Choice) -> Options:
        """Return the options of a choice, set to draw the random numbers that eager draws."""
        options = choice.options(self._options)
        inductor = {**options.inductor, **_EAGER_RANDOM} if self._needs_eager_random else options.inductor
        return dataclasses.replace(options, inductor=inductor)

    def _judge_step(self, step: Step, choice: Choice, seconds: float) -> tuple[str, str]:
        """Return the verdict on all rewrites of a step in the whole graph, even if it is for a part of it."""
        if step.item is None:
            return "", ""
        if step.allowed:
            return "", "allowed: not compared"
        options = dataclasses.replace(
            choice.everywhere().options(self._options),
            compiler="eager",
            regions="off",
            check="off",
            report=None,
        )
        with tempfile.TemporaryDirectory() as repros:
            collector = Collector(Path(repros), lambda *told: None, seconds, {step.item.name})
            participants = Participants(values=collector.new_graph_check(), counts=False)
            compiled = compile_graph(self._gm, self._inputs, options, participants)
            self._steps.compiled(lambda step: compiled)
            found, notes = collector.stages(), collector.notes()
        wrong = [problem for stage in found for problem in stage.problems]
        if wrong:
            return f"the rewrite is wrong: {wrong[0]}", ""
        not_compared = [note for note in notes if "not compared" in note]
        if not_compared:
            return not_compared[0], ""
        if not found:
            return "its rewrites cannot be judged: it makes none in the whole graph", ""
        times = max(stage.times for stage in found)
        return "", f"EQUAL, {times:.2g} x rounding" if times else "EQUAL, same bits"
