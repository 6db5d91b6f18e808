"""One Dynamo graph, tuned: by the result of an earlier tuning, or when it first runs on real inputs."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, fx

from fake.error_text import describe_error
from fxpasses.checking.bisecting.progress import ProgressLine
from fxpasses.compiling.factors import compile_surroundings
from fxpasses.compiling.observing import recorder
from fxpasses.compiling.options import Options
from fxpasses.counters import Fallback, counters
from fxpasses.errors import FxPassesError
from fxpasses.exact.time_limit import time_limit
from fxpasses.pass_manager.pass_base import Pass
from fxpasses.pass_manager.specification import parse_pass
from fxpasses.passes.registry import available_passes
from fxpasses.tuning.choice import Choice, Step
from fxpasses.tuning.content import family_of, graph_digest
from fxpasses.tuning.freezing import FREEZING
from fxpasses.tuning.intervals import LOOKS, Interval
from fxpasses.tuning.kept import ResultLocation, TuningResult, add_to_report
from fxpasses.tuning.kernels import KernelTimes
from fxpasses.tuning.measuring import MIN_SECONDS, Program, copy_inputs, duel, wall_clock
from fxpasses.tuning.proposals import Proposals, default_candidates
from fxpasses.tuning.search import SearchResult, search
from fxpasses.tuning.tuned_program import Compile, Graph, TunedProgram
from fxpasses.tuning.tuning_session import Session
from fxpasses.tuning.verdicts import Verdicts

log = logging.getLogger(__name__)


def tuned_graph(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Options, session: Session | None, compile: Compile
) -> Callable[..., Any]:
    """Compile a Dynamo graph with the best choice known for it, or tune it on its first call.

    Args:
        gm: the graph.
        inputs: its inputs, as Dynamo gives them.
        options: the user's options, with the default passes.
        session: how to measure; ``None`` for a graph that is tuned on its own when it first runs.
        compile: compiles a graph.

    Raises:
        StageError: the default cannot be compiled.
    """
    alone = session is None
    session = session or Session(
        cache="auto" if options.cache == "off" else options.cache, accepts_any_candidates=True
    )
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return _record_untuned(
            session, "each process of a job would choose for itself", compile(gm, inputs, options)
        )
    location = ResultLocation.in_cache(
        session.cache,
        graph_digest(gm, inputs),
        family_of(gm, inputs),
        {
            **compile_surroundings(),
            "goal": session.goal,
            "options": _options_text(options),
            "allowed": str(session.allowed),
        },
    )
    graph = Graph(gm, options, compile, location)
    unregistered = _unregistered_passes(location) if alone else []
    found = None if session.fresh or unregistered else _find_result(location, session)
    _record_plan_dependency(location, found)
    if unregistered:
        log.warning(
            "a graph runs without what was tuned for it, which is kept: this process does not know %s; fxpasses.tune(..., passes=[...]) with "
            "what it was tuned with finds it",
            ", ".join(unregistered),
        )
        return compile(gm, inputs, options)
    if found is not None:
        result, choice, exact = found
        _record_result(session, result, location, options)
        session.reused += 1
        counters.count("tuned_reused")
        return TunedProgram(graph, result, choice, exact).compiled(inputs)
    if any(isinstance(value, torch.SymInt) for value in inputs):
        why = "sizes are symbolic, and no other size of the graph was tuned before"
        return _record_untuned(session, why, compile(gm, inputs, options))
    return _FirstCall(graph, session, alone)


def _record_untuned(session: Session, why: str, program: Callable[..., Any]) -> Callable[..., Any]:
    """Return the program of a graph that is not tuned. Args: the session, the reason, and the program."""
    log.info("not tuned: %s", why)
    session.untuned.append(why)
    return program


def _find_result(location: ResultLocation, session: Session) -> tuple[TuningResult, Choice, bool] | None:
    """Return the kept result, its choice, and whether it is for these sizes; ``None`` if none is valid."""
    found = location.read() or location.find_in_memory(session.known)
    choice = None if found is None else valid_choice(found[0], session)
    return None if found is None or choice is None else (found[0], choice, found[1])


def _unregistered_passes(location: ResultLocation) -> list[str]:
    """Return the names of kept passes that this process has not registered: those of the user who tuned."""
    found = location.read()
    names = [step["name"] for step in found[0].steps if step.get("digest")] if found is not None else []
    return [name for name in names if name.partition("{")[0] not in available_passes()]


def valid_choice(result: TuningResult, session: Session) -> Choice | None:
    """Return the kept choice; ``None`` if it is no longer valid, or there is now time for steps left untried.

    Args:
        result: what was kept.
        session: how to measure, and what to choose from.
    """
    has_time_for_more = bool(result.left) and not result.struck and session.seconds > result.seconds
    if not session.accepts_any_candidates and (has_time_for_more or not result.covers(_candidates(session))):
        return None
    named = {str(item): item for item in (*(session.passes or ()), *session.allowed)}
    try:
        steps = [
            Step.from_data(data, lambda text: named.get(text) or parse_pass(text, available_passes()))
            for data in result.steps
        ]
        choice = Choice(tuple(steps))
        choice.options(Options())  # its settings are there, and in range
    except (FxPassesError, KeyError, TypeError, AttributeError) as error:
        log.warning("what was tuned before is not used: %s", describe_error(error))
        return None
    return choice


def _candidates(session: Session) -> Sequence[Pass]:
    return default_candidates() if session.passes is None else session.passes


def _record_plan_dependency(
    location: ResultLocation, found: tuple[TuningResult, Choice, bool] | None
) -> None:
    """Make a plan depend on the kept result if it is for these sizes. Others get compared with eager."""
    recording = recorder()
    if recording is not None:
        is_kept = found is not None and found[2] and location.file is not None and location.file.exists()
        recording.depends_on(location.file if is_kept else None)


def _options_text(options: Options) -> str:
    values = {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    return str(
        {name: str(v) for name, v in values.items() if name not in ("report", "check", "ranks", "cache")}
    )


@dataclass(eq=False)
class _FirstCall:
    """A graph that is tuned on the inputs of its first call.

    Programs are compared as compiled for that call, so nothing is compiled before it.

    Attributes:
        graph: the graph.
        session: how to measure.
        alone: whether the graph is tuned on its own, outside of a session for several graphs.
        program: the program that runs from the first call on.
    """

    graph: Graph
    session: Session
    alone: bool
    program: Callable[..., Any] | None = None

    def __call__(self, *inputs: Any) -> Any:
        if self.program is None:
            self.program = self._tune(inputs)
        return self.program(*inputs)

    def _tune(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        session, location = self.session, self.graph.location
        try:
            found, default = self._search(inputs)
        except KeyboardInterrupt:  # before anything was tried, or for the second time: use the default
            session.interrupted = True
            if self.alone:
                raise
            return self.graph.compile_default(inputs)
        except Exception as error:  # noqa: BLE001  (the default runs whatever fails in tuning)
            session.untuned.append(describe_error(error))
            log.warning("a graph is not tuned: %s: %s", type(error).__name__, error)
            counters.add_fallback(Fallback("tuning", describe_error(error), location.graph))
            return self.graph.compile_default(inputs)
        result = _result_of_search(found, location, session)
        _record_result(session, result, location, self.graph.options)
        if result.entries or not found.interrupted:
            location.write(result)
            counters.count("tuned")
        if found.interrupted:
            session.interrupted = True
            if self.alone:
                raise KeyboardInterrupt
        if not found.choice.steps:
            return default
        return TunedProgram(
            self.graph, result, found.choice, True, program=found.program.run, default=default
        )

    def _search(self, inputs: Sequence[Any]) -> tuple[SearchResult, Callable[..., Any]]:
        """Run the search. Return what it found, and the default program."""
        session = self.session
        with torch.random.fork_rng(), ProgressLine(self.alone, name="fxpasses.tune") as line:
            if self.alone:
                session.report_progress = line
            with session.count_time():
                bench = _GraphWorkbench(self.graph, copy_inputs(inputs), session)
                found = search(bench, self.graph.location.graph, session.goal, bench.default)
                return found, bench.default.run


def _record_result(
    session: Session, result: TuningResult, location: ResultLocation, options: Options
) -> None:
    session.results.append(result)
    session.locations.append(location)
    if options.report:
        add_to_report(options.report, result)


def _result_of_search(found: SearchResult, location: ResultLocation, session: Session) -> TuningResult:
    ratio = found.ratio
    result = TuningResult(
        location.graph,
        tuple(step.to_data() for step in found.choice.steps),
        (),
        location.surroundings,
        () if ratio is None or math.isinf(ratio.high) else (ratio.middle, ratio.low, ratio.high),
        found.memory,
        found.left,
        candidates={str(item): item.identify().digest for item in _candidates(session)},
        # JSON has no infinity. After an interruption, any time is more than what this tuning had.
        seconds=0.0 if found.interrupted else min(session.seconds, sys.float_info.max),
    )
    entries = tuple(dataclasses.replace(entry, situation=result.situation) for entry in found.entries)
    return dataclasses.replace(result, entries=entries)


_ANY_STEP = Step("any step")
"""What is left if there is no time to compile any step. Finding out which steps exist takes time as well."""

_CAPTURE_SHARE = 0.25
"""An upper bound on the time to capture a graph, as a share of the time to compile it."""

_KERNEL_TIMES_SHARE = 0.05
"""The share of the time left in which kernels are measured. Ranking steps must not replace trying them."""


class _GraphWorkbench:
    """The workbench of one graph: see :class:`fxpasses.tuning.search.Workbench`."""

    def __init__(self, graph: Graph, inputs: list[Any], session: Session) -> None:
        gm, options = graph.gm, dataclasses.replace(graph.options, report=None)
        self._inputs, self._options, self._session = inputs, options, session
        self._compile = lambda chosen: graph.compiled(inputs, chosen)
        self._compiling_seconds: list[float] = []
        self._measuring_seconds, self._checking_seconds, self._can_try_steps = (
            0.0,
            {"pass": 0.0, "setting": 0.0},
            True,
        )
        self.seconds_left, self.report_progress = session.seconds_left, session.report_progress
        self.proposals = lambda choice: [(_ANY_STEP, 0)]
        regions = counters.snapshot().regions
        self.default = self.compiled(Choice(), graph.options)
        start = wall_clock()
        self.default.step()
        self._step_seconds = wall_clock() - start
        has_regions = counters.snapshot().regions > regions
        # Finding the steps captures the graph again. Do that only if there is time left to try one of them.
        self._can_try_steps = session.seconds_left() > (1 + _CAPTURE_SHARE) * self.expected_seconds(_ANY_STEP)
        if self._can_try_steps:
            session.report_progress("looking for passes that change the graph")
            median_ratios = graph.location.median_ratios()
            kernels = KernelTimes(session.seconds_left() * _KERNEL_TIMES_SHARE, session.clock)
            self.proposals = Proposals(
                gm,
                inputs,
                options,
                session.goal,
                session.passes,
                session.allowed,
                has_regions,
                median_ratios,
                kernels,
            )
        # Measuring may mutate inputs, so the comparison starts from copies.
        self._verdicts = Verdicts(gm, copy_inputs(inputs), options, self._compile)

    def compiled(self, choice: Choice, options: Options | None = None) -> Program:
        start = time.monotonic()
        # Kernels of other programs ask for writable pointers to weights. If frozen weights were shared with
        # them, each call would have to compare their bits.
        inputs = copy_inputs(self._inputs) if FREEZING in choice.steps else self._inputs
        program = Program(self._compile(choice.options(options or self._options)), inputs)
        program.step()
        growth = math.prod(step.growth for step in choice.steps[-1:])
        self._compiling_seconds.append((time.monotonic() - start) / growth)
        return program

    def duel(
        self, old: Program, new: Program, is_conclusive: Callable[[Interval], bool], min_pairs: int = LOOKS[0]
    ) -> Interval:
        """Measure two programs in turns. Args: see :class:`fxpasses.tuning.search.Workbench`."""
        start = time.monotonic()
        is_final = min_pairs > LOOKS[0]
        reserved = 0.0 if is_final else self._final_seconds
        has_time = lambda: self.seconds_left() > reserved  # noqa: E731
        clock = self._session.clock
        found = duel(
            old.step,
            new.step,
            clock=clock,
            is_conclusive=is_conclusive,
            has_time=has_time,
            min_pairs=min_pairs,
        )
        if not is_final:
            self._measuring_seconds = max(self._measuring_seconds, time.monotonic() - start)
        return found

    def peak_bytes(self, program: Program) -> int:
        return program.peak_bytes()

    def refusal(self, choice: Choice, program: Program) -> tuple[str, str]:
        start, seconds_left = time.monotonic(), self.seconds_left() - self._final_seconds
        try:
            with time_limit(seconds_left):
                return self._verdicts.refusal(choice, program.run, max(seconds_left / 2, 0.0))
        finally:
            kind = _step_kind(choice.steps[-1])
            self._checking_seconds[kind] = max(self._checking_seconds[kind], time.monotonic() - start)

    @property
    def _final_seconds(self) -> float:
        """Estimate the seconds to measure a clear winner against the default."""
        return self._duel_seconds(LOOKS[0])

    def _duel_seconds(self, pairs: int) -> float:
        return 2 * (2 + pairs) * max(self._step_seconds, MIN_SECONDS)

    def expected_seconds(self, step: Step) -> float:
        """Estimate the seconds to compile, measure and check a program, and to measure the winner.

        Compiling takes as long as the longest so far (without the first, which loads what all need), and
        longer for more calls. So do measuring, and checking: the rewrites of a pass are judged as well.
        """
        if not self._can_try_steps:
            return math.inf
        compiling = max(self._compiling_seconds[1:] or self._compiling_seconds) * step.growth
        measuring = max(self._measuring_seconds, self._duel_seconds(LOOKS[0]))
        return compiling + measuring + self._checking_seconds[_step_kind(step)] + self._final_seconds


def _step_kind(step: Step) -> str:
    return "setting" if step.item is None else "pass"
