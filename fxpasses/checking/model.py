"""Check a model stage by stage: eager, captured graphs, passes, partition, repeated regions, compiled."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from fake.notebook import as_html
from fake.wrong_arguments import check_dynamic, check_type
from fxpasses import _torch
from fxpasses.checking.bisecting.progress import ProgressLine
from fxpasses.checking.checked_calls import Rewrite, Trial
from fxpasses.checking.comparison.rounding import EXACT, PROGRAM_LIMIT, distance, largest_error
from fxpasses.checking.stages._torch_dynamo import compile_isolated
from fxpasses.checking.stages.captured import CaptureCheck
from fxpasses.checking.stages.lowered import LoweringCheck
from fxpasses.checking.stages.model_steps import Results, Steps
from fxpasses.checking.stages.region_calls import NoRegions, RegionCalls
from fxpasses.checking.stages.staged import Stage, in_eager_with_repro
from fxpasses.checking.watch import ValueCheck
from fxpasses.compiling.graph_compilers import Compiler
from fxpasses.compiling.observing import Observer
from fxpasses.compiling.options import Options
from fxpasses.errors import OptionsError
from fxpasses.exact import Verdict
from fxpasses.pipeline.compile_graph import compile_graph, unpartitioned_compiler
from fxpasses.pipeline.stages import Participants

_COLUMNS = ("stage", "max error", "x rounding", "first difference", "verdict")


@dataclass(frozen=True)
class StageCheck:
    """One row of the table.

    Attributes:
        stage: ``"eager"``, ``"capture"``, ``"pass NAME (joint)"``, ``"partition"``, ``"regions"``, compiler.
        max_error: the largest distance of any result from float64.
        times: how many times as far from float64 as rounding takes what it is compared with (eager, or the
            graph before a pass), as the root mean square over the worst result. 0 if all bits match.
        module: path of the first module whose values differ, or "".
        problems: what is wrong; empty if the stage is right.
    """

    stage: str
    max_error: float
    times: float
    module: str
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


@dataclass(frozen=True)
class ModelCheck:
    """The stages of a model, in order. Prints as a table; true if all are right.

    Attributes:
        stages: one entry per stage.
        notes: what could not be compared, and why.
        graphs: how many graphs Dynamo made: several after graph breaks, none if nothing was compiled.
    """

    stages: tuple[StageCheck, ...]
    notes: tuple[str, ...] = ()
    graphs: int = 1

    @property
    def ok(self) -> bool:
        """Whether something was compiled, and every stage is right."""
        return self.graphs > 0 and all(stage.ok for stage in self.stages)

    def __bool__(self) -> bool:
        return self.ok

    def __rich__(self) -> Table:
        broken = f", {self.graphs} graphs" if self.graphs > 1 else ""
        table = Table(title=f"compiled against eager{broken}", title_justify="left")
        for name in _COLUMNS:
            table.add_column(
                name, justify="right" if name in ("max error", "x rounding") else "left", overflow="fold"
            )
        for row in self._rows():
            table.add_row(*row)
        return table

    def _rows(self) -> list[tuple[str, ...]]:
        def times(stage: StageCheck) -> str:
            if stage.stage == "eager" or stage.times > EXACT:
                return ""
            return f"{stage.times:.2g}" if stage.times else "same bits"

        return [
            (s.stage, f"{s.max_error:.2g}", times(s), s.module, "ok" if s.ok else "WRONG")
            for s in self.stages
        ]

    def _repr_html_(self) -> str:
        return as_html("\n".join(["compiled against eager", *self.details]), _COLUMNS, self._rows())

    @property
    def details(self) -> list[str]:
        """The faults of each stage in words, and the notes: the text below the table."""
        wrong = [f"{stage.stage}: {problem}" for stage in self.stages for problem in stage.problems[:3]]
        return [*wrong, *self.notes]

    def __str__(self) -> str:
        console = Console(width=100, force_terminal=False)
        with console.capture() as captured:
            self.print_on(console)
        return captured.get()

    def print_on(self, console: Console) -> None:
        """Print the table, then its text in lines of any length, since users copy commands from it."""
        console.print(self)
        for told in self.details:
            console.print(told, markup=False, soft_wrap=True)


def check(
    model: nn.Module | Callable[..., Any],
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    backward: bool = True,
    show: bool = True,
    seconds: float | None = None,
) -> ModelCheck:
    """Compare a model in eager, after each stage of the compilation, and compiled: results and gradients.

    The model is not touched: copies run. Its results, gradients of parameters and inputs, and buffers are
    compared; the loss is a fixed weighted sum of the outputs. Progress is shown on standard error.

    Args:
        model: a module, or a function of tensors.
        *inputs: its positional arguments. A single tuple or list holds all of them, and may be followed by a
            mapping of keyword arguments. So wrap a sole argument that is a tuple or list in a tuple.
        kwargs: its keyword arguments.
        options: as for ``torch.compile(backend="fxpasses")``.
        dynamic: as for ``torch.compile``.
        backward: whether to compare gradients.
        show: whether to print the table and the progress.
        seconds: time after which passes get only the model's own inputs and output gradients. A note says so.

    Raises:
        OptionsError: wrong option, ``seconds`` below zero, unset lazy parameter, or not callable or copyable.
        StageError: a stage fails.

    >>> import torch, fxpasses
    >>> fxpasses.check(torch.nn.Linear(3, 2), torch.ones(4, 3), options={"compiler": "eager"}, show=False).ok
    True
    """
    if not callable(model):
        raise OptionsError("model", model, "a module or function")
    check_type("check", "kwargs", kwargs, (Mapping, type(None)), "the model's keyword arguments by name")
    check_dynamic("check", dynamic, backward=backward, show=show)
    args, named = _arguments(inputs, kwargs)
    if seconds is not None and not (isinstance(seconds, int | float) and seconds >= 0):
        raise OptionsError("seconds", seconds, "a number of seconds, or None")
    parsed = Options.parse(options)
    with ProgressLine(show) as tell:
        result = _Stages(Steps(model, args, named, backward), parsed, dynamic, tell, seconds).check()
    if show:
        result.print_on(Console())
    return result


def _arguments(
    inputs: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if inputs and isinstance(inputs[0], (tuple, list)):
        if len(inputs) == 1:
            return tuple(inputs[0]), dict(kwargs or {})
        if len(inputs) == 2 and isinstance(inputs[1], Mapping) and kwargs is None:
            return tuple(inputs[0]), dict(inputs[1])
    return inputs, dict(kwargs or {})


class _Stages:
    """The stages of one model, in sequence."""

    def __init__(
        self, steps: Steps, options: Options, dynamic: bool | None, tell: ProgressLine, seconds: float | None
    ) -> None:
        self._steps, self._options, self._dynamic, self._tell = steps, options, dynamic, tell
        self._seconds = seconds
        self._unchecked_options = dataclasses.replace(options, check="off", report=None)
        self._found: list[StageCheck] = []
        self._notes: list[str] = []
        self._graphs: dict[str, int] = {}
        """Number of graphs that each stage compiled."""

    def check(self) -> ModelCheck:
        """Run every stage."""
        self._tell("eager, and float64")
        try:
            self._eager = self._steps.eager()
        except Exception as error:
            error.add_note("fxpasses.check: this is the model itself, in eager; nothing was compiled yet")
            raise
        self._wide, why_not = self._steps.reference_runs()
        if why_not:
            self._notes.append(
                f"the model does not run in float64 ({why_not}): errors are distances from eager"
            )
        self._variation = self._steps.variation(self._eager)
        self._found.append(compare_results("eager", self._eager, self._eager, self._wide))
        if self._variation:
            self._notes.append(f"{self._variation}, so that only graphs are compared with graphs")
        operators = dataclasses.replace(self._unchecked_options, compiler="eager")
        captured = dataclasses.replace(operators, passes=())
        exact = CaptureCheck()
        self._compare_stage("capture", captured, exact, unpartitioned_compiler)
        self._add_verdicts(exact.verdicts_found)
        if not self._found[-1].ok:
            self._stage_repro("capture")
        if not self._graphs["capture"]:
            self._notes.append("Dynamo made no graph of the model: nothing was compiled, and nothing checked")
            return ModelCheck(tuple(self._found), tuple(self._notes), 0)
        self._check_passes(operators)
        self._compare_stage("passes and partition", operators)
        self._compare_stage("regions", operators, RegionCalls())
        if self._options.compiler == "inductor":
            self._check_inductor()
        counts = {count for name, count in self._graphs.items() if "regions" not in name}
        if len(counts) > 1:
            told = ", ".join(f"{name}: {count}" for name, count in self._graphs.items())
            self._notes.append(f"Dynamo did not make the same graphs each time ({told}): some ran in eager")
        return ModelCheck(tuple(self._found), tuple(self._notes), max(counts))

    def _check_passes(self, operators: Options) -> None:
        """Check each pass, and the partition, graph by graph."""
        collector = Collector(self._options.repro_directory(), self._tell, self._seconds)
        self._run_compiled("passes", operators, values=collector.new_graph_check)
        self._found += collector.stages()
        self._notes += collector.notes()
        if any(stage.stage == "partition" and not stage.ok for stage in self._found):
            self._stage_repro("partition")

    def _check_inductor(self) -> None:
        self._compare_stage("inductor", self._unchecked_options)
        wrong = not self._variation and not self._found[-1].ok
        regions = RegionCalls()
        self._compare_stage("inductor with regions", self._unchecked_options, regions)
        if not wrong and not self._found[-1].ok:
            self._notes.append(
                "only repeated layers that are compiled once are wrong: options={'regions': 'off'} does without them"
            )
        lowered = LoweringCheck(self._options.repro_directory())
        if wrong:
            self._tell("looking for the calls that Inductor gets wrong")
            with _torch.inductor_config.patch(force_disable_caches=True):
                self._run_compiled("inductor", self._unchecked_options, lowered=lowered)
        elif not self._found[-1].ok:
            for graph in regions.graphs.found:
                lowered.check_alone(graph)
        if lowered.repro:
            self._notes.append(
                f"`python {lowered.repro}` shows what Inductor does on {_count_calls(lowered.calls)}"
            )

    def _compare_stage(
        self,
        name: str,
        options: Options,
        watching: RegionCalls | CaptureCheck | None = None,
        compiler: Callable[..., Compiler] | None = None,
    ) -> None:
        """Run a stage whose results are compared with those of eager."""
        self._tell(name)
        got = self._run_compiled(name, options, watching=watching, compiler=compiler)
        regions = watching if isinstance(watching, RegionCalls) else None
        if self._variation or (regions is not None and not regions.found):
            return
        stage = compare_results(name, got, self._eager, self._wide)
        if regions is not None and any(p.startswith("output") for p in stage.problems):
            stage = dataclasses.replace(stage, module=regions.first_wrong_module())
        self._found.append(stage)

    def _run_compiled(
        self,
        name: str,
        options: Options,
        values: Callable[[], ValueCheck] | None = None,
        lowered: LoweringCheck | None = None,
        watching: RegionCalls | CaptureCheck | None = None,
        compiler: Callable[..., Compiler] | None = None,
    ) -> Results:
        self._graphs[name] = 0
        observers: list[Observer] = [watching] if watching is not None else []
        if not isinstance(watching, RegionCalls):
            options = dataclasses.replace(options, regions="off")

        def backend(gm: Any, example_inputs: Sequence[Any]) -> Any:
            self._graphs[name] += 1
            for observer in observers:
                observer.dynamo(gm, options)
            make_compiler = watching.new_compiler if isinstance(watching, RegionCalls) else compiler
            participants = Participants(make_compiler, observers, values() if values else None, lowered)
            try:
                compiled = compile_graph(gm, example_inputs, options, participants)
            except NoRegions:  # without regions, it was compared already
                return _torch.without_function_modes()(gm)
            return watching.wrap_compiled(compiled) if watching is not None else compiled

        return self._steps.compiled(lambda function: compile_isolated(function, backend, self._dynamic))

    def _add_verdicts(self, verdicts: Sequence[Verdict]) -> None:
        """Add what exact arithmetic says of the captured graphs to what their results say."""
        for verdict in verdicts:
            if verdict.kind == "UNPROVED":
                self._notes.append(
                    f"the capture is not proved to be the function of eager's operators: {verdict}"
                )
            elif verdict.kind != "EQUAL":
                stage = (
                    self._found.pop()
                    if self._found[-1].stage == "capture"
                    else StageCheck("capture", 0.0, 0.0, "", ())
                )
                self._found.append(dataclasses.replace(stage, problems=(*stage.problems, str(verdict))))

    def _stage_repro(self, stage: Stage) -> None:
        self._tell(f"looking for the calls that the {stage} gets wrong")

        def tell(file: str, calls: int, why: str) -> None:
            """Note the repro file. Args: its path or "", its number of calls, and why there is none or ""."""
            if file:
                self._notes.append(f"`python {file}` shows what the {stage} does on {_count_calls(calls)}")

        def backend(gm: Any, example_inputs: Sequence[Any]) -> Any:
            return in_eager_with_repro(gm, stage, self._options.repro_directory(), tell)

        self._steps.compiled(lambda function: compile_isolated(function, backend, self._dynamic))


def compare_results(name: str, got: Results, eager: Results, wide: Sequence[Results]) -> StageCheck:
    """Compare the results of a step with those of eager.

    Args:
        name: the name of the stage.
        got: the results to judge.
        eager: the results in eager.
        wide: those in float64, if it runs there, and then those of nearby inputs.
    """
    problems: list[str] = []
    module, largest, most = "", 0.0, 0.0
    for key, usual in eager.items():
        value = got.get(key)
        if value is None or (value.shape, value.dtype) != (usual.shape, usual.dtype):
            problems.append(f"{key} is missing or of another type")
            continue
        exact = [run[key] for run in wide if key in run and run[key].shape == usual.shape]
        largest = max(largest, largest_error(exact[0] if exact else usual, value))
        how = None if got is eager else distance(usual, value, exact)
        most = max(most, how.times if how is not None else 0.0)
        if how is not None and how.times > PROGRAM_LIMIT:
            problems.append(f"{key}: {how}")
            if not module:
                module = key.removeprefix("gradient of ").removeprefix("buffer ").rpartition(".")[0]
    problems += [f"{key}: eager has none" for key in got if key not in eager]
    return StageCheck(name, largest, most, module, tuple(problems))


def _count_calls(count: int) -> str:
    return f"{count} call{'s' * (count != 1)}"


class Collector:
    """Collects the findings of the value checks of a model's graphs instead of raising them.

    Args:
        directory: where repro files are written.
        tell: shows what is being checked.
        seconds: after how long to skip made-up inputs.
        only: the names of the passes to check; ``None`` for all, and the partition.
    """

    def __init__(
        self,
        directory: Path,
        tell: Callable[..., None],
        seconds: float | None,
        only: Collection[str] | None = None,
    ) -> None:
        self._directory, self._tell = directory, tell
        self.only = only
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._seconds = seconds
        self._graphs = 0
        self._found: dict[str, StageCheck] = {}
        self._notes: list[str] = []
        self._cut_short: dict[str, None] = {}

    def new_graph_check(self) -> ValueCheck:
        """Return the check of one more graph: each has its own graphs and inputs."""
        self._graphs += 1
        return _GraphCheck(self, self._graphs, self._directory)

    def stages(self) -> list[StageCheck]:
        """Return one entry per rewrite, the worst over its inputs and all graphs."""
        return list(self._found.values())

    def notes(self) -> list[str]:
        """Return notes on what could not be checked, and on repro files."""
        if not self._cut_short:
            return self._notes
        names = ", ".join(self._cut_short)
        left_out = f"after {self._seconds:g} seconds made-up inputs were left out: {names}"
        return [*self._notes, left_out]

    def note(self, text: str) -> None:
        """Keep a sentence for the end."""
        if text not in self._notes:
            self._notes.append(text)

    def has_time(self, rewrite: Rewrite) -> bool:
        """Whether to still try made-up inputs."""
        if self._deadline is None or time.monotonic() < self._deadline:
            return True
        self._cut_short[_stage_name(rewrite)] = None
        return False

    def show_rewrite(self, rewrite: Rewrite, graph: int, where: str) -> None:
        """Show the rewrite that is being checked on the progress line.

        Args:
            rewrite: the pass and its graphs.
            graph: the number of the graph among those of its kind, from 1.
            where: the inputs that it is tried on, in words.
        """
        self._tell(f"{_stage_name(rewrite)}{f', graph {graph}' if graph > 1 else ''}", where)

    def add(self, stage: StageCheck) -> None:
        """Merge one comparison into those of the same rewrite."""
        known = self._found.get(stage.stage, StageCheck(stage.stage, 0.0, 0.0, "", ()))
        self._found[stage.stage] = StageCheck(
            stage.stage,
            max(known.max_error, stage.max_error),
            max(known.times, stage.times),
            known.module or stage.module,
            known.problems or stage.problems,
        )


class _GraphCheck(ValueCheck):
    """The value check of one graph, for a collector."""

    def __init__(self, collector: Collector, number: int, directory: Path) -> None:
        super().__init__(directory)
        self._collector, self._number = collector, number
        self._blamed: set[str] = set()

    def has_time(self, rewrite: Rewrite) -> bool:
        return self._collector.has_time(rewrite)

    def rewrites(self, kind: str) -> list[Rewrite]:
        found, only = super().rewrites(kind), self._collector.only
        return found if only is None else [r for r in found if r.item is not None and r.item.name in only]

    def cannot_examine(self, rewrite: Rewrite, why: str) -> None:
        self._collector.note(f"{_stage_name(rewrite)} is not compared by value: {why}")

    def examine(self, rewrite: Rewrite, trial: Trial) -> None:
        name = _stage_name(rewrite)
        self._collector.show_rewrite(rewrite, self._number, trial.where)
        found = trial.mismatches(rewrite)
        error, times = 0.0, 0.0
        # Made-up values may be arbitrarily large: their errors say nothing about the model.
        if trial.real and not any(m.fault in ("error", "metadata") for m in found):
            error, times = trial.reference.errors_of(rewrite.after)
        module = ""
        problems = tuple(f"{m}, on {trial.where}" for m in found)
        if found and name not in self._blamed:
            self._blamed.add(name)
            self._collector.show_rewrite(rewrite, self._number, "looking for the calls that are wrong")
            blame = self.blame(rewrite, trial, found)
            module = blame.location.module
            problems = (
                (f"{problems[0]}, {blame.location}", *problems[1:]) if str(blame.location) else problems
            )
            if blame.repro:
                self._collector.note(f"`python {blame.repro}` shows what {name} does")
        self._collector.add(StageCheck(name, error, times, module, problems))


def _stage_name(rewrite: Rewrite) -> str:
    return f"pass {rewrite.item.name} ({rewrite.kind})" if rewrite.item else "partition"
