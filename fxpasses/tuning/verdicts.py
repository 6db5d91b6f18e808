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

from fxpasses.checking.model import Collector, StageCheck, judged
from fxpasses.checking.model_steps import Results, Steps
from fxpasses.checking.rounding import PROGRAM_LIMIT
from fxpasses.compiling.options import Options
from fxpasses.pipeline.compile_graph import compile_graph
from fxpasses.pipeline.stages import Hooks
from fxpasses.tuning.choice import Choice, Step

_RANDOM = {"fallback_random": True}
"""With this Inductor option, compiled graphs draw the same random numbers as eager."""


_NO_FARTHER = 2.0
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
        end = self.compared(choice, program)
        if not end.ok:
            return f"not what eager gives: {end.problems[0]}", ""
        whose = "eager's" if end.times <= PROGRAM_LIMIT else "the default's"
        told = [f"{whose} results, {end.times:.2g} x rounding" if end.times else "eager's bits"]
        computed = [v for name, v in (self._eager or {}).items() if name.startswith(("output", "gradient"))]
        if not any(bool(value.isfinite().any()) for value in computed):
            told = ["nothing that eager gives is finite"]
        for step in choice.steps[-1:]:
            refused, verdict = self._of_step(step, choice, seconds)
            if refused:
                return refused, ""
            told = [verdict, *told] if verdict else told
        return "", "; ".join(told)

    def compared(self, choice: Choice, program: Callable[..., Any]) -> StageCheck:
        """Compare the results and gradients of a program with those of eager.

        A result that is no farther from float64 than the default's (see ``_NO_FARTHER``) is right as well.
        Some kernels compute in another order (the gradients of batch norm).

        Args:
            choice: what it was compiled with.
            program: takes the inputs.
        """
        if self._eager is None:
            self._eager = self._steps.eager()
            self._varies = self._steps.variation(self._eager)
            self._wide, _ = self._steps.yardsticks()
        same = choice.without_allowed()
        if self._random or same != choice:
            program = self._compile(self._drawing(same))
        got = self._steps.compiled(lambda step: program)
        # Apply the limits for kernels, whatever runs the graph. Verdicts on rewrites say which round worse.
        end = judged(f"inductor, {choice}", got, self._eager, self._wide)
        if end.ok:
            return end
        if self._default is None:
            default = self._compile(self._drawing(Choice()))
            self._default = self._steps.compiled(lambda step: default)
        next_to_it = judged(end.stage, got, self._default, self._wide)
        no_farther = next_to_it.ok and next_to_it.times <= _NO_FARTHER
        return dataclasses.replace(end, problems=()) if no_farther else end

    @property
    def _random(self) -> bool:
        return bool(self._varies) and self._options.compiler == "inductor"

    def _drawing(self, choice: Choice) -> Options:
        """Return the options of a choice, set to draw the random numbers that eager draws."""
        options = choice.options(self._options)
        draws = {**options.inductor, **_RANDOM} if self._random else options.inductor
        return dataclasses.replace(options, inductor=draws)

    def _of_step(self, step: Step, choice: Choice, seconds: float) -> tuple[str, str]:
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
            hooks = Hooks(values=collector.of_next_graph(), counts=False)
            compiled = compile_graph(self._gm, self._inputs, options, hooks)
            self._steps.compiled(lambda step: compiled)
            found, notes = collector.stages(), collector.told()
        wrong = [problem for stage in found for problem in stage.problems]
        if wrong:
            return f"the rewrite is wrong: {wrong[0]}", ""
        unseen = [note for note in notes if "not compared" in note]
        if unseen:
            return unseen[0], ""
        if not found:
            return "its rewrites cannot be judged: it makes none in the whole graph", ""
        times = max(stage.times for stage in found)
        return "", f"EQUAL, {times:.2g} x rounding" if times else "EQUAL, same bits"
