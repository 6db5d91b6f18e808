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
from fxpasses.checking.progress import ProgressLine
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
from fxpasses.tuning.kept import Kept, Place, add_to_report
from fxpasses.tuning.kernels import KernelTimes
from fxpasses.tuning.measuring import SHORTEST, Program, duel, own_inputs, wall_clock
from fxpasses.tuning.proposals import Proposals, default_candidates
from fxpasses.tuning.search import Found, search
from fxpasses.tuning.tuned_program import Compile, Graph, TunedProgram
from fxpasses.tuning.tuning_session import Session
from fxpasses.tuning.verdicts import Verdicts

log = logging.getLogger(__name__)


def tuned_graph(
    gm: fx.GraphModule, inputs: Sequence[Any], options: Options, one: Session | None, compile: Compile
) -> Callable[..., Any]:
    """Compile a Dynamo graph with the best choice known for it, or tune it on its first call.

    Args:
        gm: the graph.
        inputs: its inputs, as Dynamo gives them.
        options: the user's options, with the default passes.
        one: how to measure; ``None`` for a graph that is tuned on its own when it first runs.
        compile: compiles a graph.

    Raises:
        StageError: the default cannot be compiled.
    """
    alone = one is None
    one = one or Session(cache="auto" if options.cache == "off" else options.cache, takes_any=True)
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return _untuned(one, "each process of a job would choose for itself", compile(gm, inputs, options))
    place = Place.under(
        one.cache,
        graph_digest(gm, inputs),
        family_of(gm, inputs),
        {**compile_surroundings(), "goal": one.goal, "options": _told(options), "allowed": str(one.allowed)},
    )
    graph = Graph(gm, options, compile, place)
    unknown = _unknown_passes(place) if alone else []
    found = None if one.fresh or unknown else _found(place, one)
    _told_to_plan(place, found)
    if unknown:
        log.warning(
            "a graph runs without what was tuned for it, which is kept: this process does not know %s; fxpasses.tune(..., passes=[...]) with "
            "what it was tuned with finds it",
            ", ".join(unknown),
        )
        return compile(gm, inputs, options)
    if found is not None:
        kept, choice, exact = found
        _told_to(one, kept, place, options)
        one.reused += 1
        counters.count("tuned_reused")
        return TunedProgram(graph, kept, choice, exact).compiled(inputs)
    if any(isinstance(value, torch.SymInt) for value in inputs):
        why = "sizes are symbolic, and no other size of the graph was tuned before"
        return _untuned(one, why, compile(gm, inputs, options))
    return _FirstCall(graph, one, alone)


def _untuned(one: Session, why: str, program: Callable[..., Any]) -> Callable[..., Any]:
    """Return the program of a graph that is not tuned. Args: the session, the reason, and the program."""
    log.info("not tuned: %s", why)
    one.untuned.append(why)
    return program


def _found(place: Place, one: Session) -> tuple[Kept, Choice, bool] | None:
    """Return the kept result, its choice, and whether it is for these sizes; ``None`` if none is valid."""
    found = place.read() or place.of_known(one.known)
    choice = None if found is None else choice_of(found[0], one)
    return None if found is None or choice is None else (found[0], choice, found[1])


def _unknown_passes(place: Place) -> list[str]:
    """Return the names of kept passes that this process has not registered: those of the user who tuned."""
    found = place.read()
    names = [step["name"] for step in found[0].steps if step.get("digest")] if found is not None else []
    return [name for name in names if name.partition("{")[0] not in available_passes()]


def choice_of(kept: Kept, one: Session) -> Choice | None:
    """Return the kept choice; ``None`` if it is no longer valid, or there is now time for steps left untried.

    Args:
        kept: what was kept.
        one: how to measure, and what to choose from.
    """
    goes_on = bool(kept.left) and not kept.struck and one.seconds > kept.seconds
    if not one.takes_any and (goes_on or not kept.covers(_candidates(one))):
        return None
    named = {str(item): item for item in (*(one.passes or ()), *one.allowed)}
    try:
        steps = [
            Step.from_data(data, lambda text: named.get(text) or parse_pass(text, available_passes()))
            for data in kept.steps
        ]
        choice = Choice(tuple(steps))
        choice.options(Options())  # its settings are there, and in range
    except (FxPassesError, KeyError, TypeError, AttributeError) as error:
        log.warning("what was tuned before is not used: %s", describe_error(error))
        return None
    return choice


def _candidates(one: Session) -> Sequence[Pass]:
    return default_candidates() if one.passes is None else one.passes


def _told_to_plan(place: Place, found: tuple[Kept, Choice, bool] | None) -> None:
    """Make a plan depend on the kept result if it is for these sizes. Others get compared with eager."""
    recording = recorder()
    if recording is not None:
        is_kept = found is not None and found[2] and place.file is not None and place.file.exists()
        recording.depends_on(place.file if is_kept else None)


def _told(options: Options) -> str:
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
        running: the program that runs from the first call on.
    """

    graph: Graph
    session: Session
    alone: bool
    running: Callable[..., Any] | None = None

    def __call__(self, *inputs: Any) -> Any:
        if self.running is None:
            self.running = self._tuned(inputs)
        return self.running(*inputs)

    def _tuned(self, inputs: Sequence[Any]) -> Callable[..., Any]:
        one, place = self.session, self.graph.place
        try:
            found, default = self._searched(inputs)
        except KeyboardInterrupt:  # before anything was tried, or for the second time: use the default
            one.interrupted = True
            if self.alone:
                raise
            return self.graph.compiled_in_a_call(inputs)
        except Exception as error:  # noqa: BLE001  (the default runs whatever fails in tuning)
            one.untuned.append(describe_error(error))
            log.warning("a graph is not tuned: %s: %s", type(error).__name__, error)
            counters.add_fallback(Fallback("tuning", describe_error(error), place.graph))
            return self.graph.compiled_in_a_call(inputs)
        kept = _kept(found, place, one)
        _told_to(one, kept, place, self.graph.options)
        if kept.entries or not found.interrupted:
            place.write(kept)
            counters.count("tuned")
        if found.interrupted:
            one.interrupted = True
            if self.alone:
                raise KeyboardInterrupt
        if not found.choice.steps:
            return default
        return TunedProgram(self.graph, kept, found.choice, True, running=found.program.run, default=default)

    def _searched(self, inputs: Sequence[Any]) -> tuple[Found, Callable[..., Any]]:
        """Run the search. Return what it found, and the default program."""
        one = self.session
        with torch.random.fork_rng(), ProgressLine(self.alone, name="fxpasses.tune") as line:
            if self.alone:
                one.tell = line
            with one.searching():
                bench = _Bench(self.graph, own_inputs(inputs), one)
                found = search(bench, self.graph.place.graph, one.goal, bench.default)
                return found, bench.default.run


def _told_to(one: Session, kept: Kept, place: Place, options: Options) -> None:
    one.results.append(kept)
    one.places.append(place)
    if options.report:
        add_to_report(options.report, kept)


def _kept(found: Found, place: Place, one: Session) -> Kept:
    ratio = found.ratio
    kept = Kept(
        place.graph,
        tuple(step.to_data() for step in found.choice.steps),
        (),
        place.surroundings,
        () if ratio is None or math.isinf(ratio.high) else (ratio.middle, ratio.low, ratio.high),
        found.memory,
        found.left,
        candidates={str(item): item.identify().digest for item in _candidates(one)},
        # JSON has no infinity. After an interruption, any time is more than what this tuning had.
        seconds=0.0 if found.interrupted else min(one.seconds, sys.float_info.max),
    )
    entries = tuple(dataclasses.replace(entry, situation=kept.situation) for entry in found.entries)
    return dataclasses.replace(kept, entries=entries)


_ANY = Step("any step")
"""What is left if there is no time to compile any step. Finding out which steps exist takes time as well."""

_CAPTURING = 0.25
"""An upper bound on the time to capture a graph, as a share of the time to compile it."""

_WEIGHING = 0.05
"""The share of the time left in which kernels are measured. Ranking steps must not replace trying them."""


class _Bench:
    """The workbench of one graph: see :class:`fxpasses.tuning.search.Workbench`."""

    def __init__(self, graph: Graph, inputs: list[Any], one: Session) -> None:
        gm, options = graph.gm, dataclasses.replace(graph.options, report=None)
        self._inputs, self._options, self._session = inputs, options, one
        self._compile = lambda chosen: graph.compiled(inputs, chosen)
        self._compiling: list[float] = []
        self._measuring, self._checking, self._tries = 0.0, {"pass": 0.0, "setting": 0.0}, True
        self.seconds_left, self.tell = one.seconds_left, one.tell
        self.proposals = lambda choice: [(_ANY, 0)]
        regions = counters.snapshot().regions
        self.default = self.compiled(Choice(), graph.options)
        start = wall_clock()
        self.default.step()
        self._stepping = wall_clock() - start
        has_regions = counters.snapshot().regions > regions
        # Finding the steps captures the graph again. Do that only if there is time left to try one of them.
        self._tries = one.seconds_left() > (1 + _CAPTURING) * self.expected_seconds(_ANY)
        if self._tries:
            one.tell("looking for passes that change the graph")
            gained = graph.place.gained()
            kernels = KernelTimes(one.seconds_left() * _WEIGHING, one.clock)
            self.proposals = Proposals(
                gm, inputs, options, one.goal, one.passes, one.allowed, has_regions, gained, kernels
            )
        # Measuring may mutate inputs, so the comparison starts from copies.
        self._verdicts = Verdicts(gm, own_inputs(inputs), options, self._compile)

    def compiled(self, choice: Choice, options: Options | None = None) -> Program:
        start = time.monotonic()
        # Kernels of other programs ask for writable pointers to weights. If frozen weights were shared with
        # them, each call would have to compare their bits.
        inputs = own_inputs(self._inputs) if FREEZING in choice.steps else self._inputs
        program = Program(self._compile(choice.options(options or self._options)), inputs)
        program.step()
        growth = math.prod(step.growth for step in choice.steps[-1:])
        self._compiling.append((time.monotonic() - start) / growth)
        return program

    def duel(
        self, old: Program, new: Program, settled: Callable[[Interval], bool], least: int = LOOKS[0]
    ) -> Interval:
        """Measure two programs in turns. Args: see :class:`fxpasses.tuning.search.Workbench`."""
        start = time.monotonic()
        is_final = least > LOOKS[0]
        kept = 0.0 if is_final else self._final_seconds
        has_time = lambda: self.seconds_left() > kept  # noqa: E731
        clock = self._session.clock
        found = duel(old.step, new.step, clock=clock, settled=settled, has_time=has_time, least=least)
        if not is_final:
            self._measuring = max(self._measuring, time.monotonic() - start)
        return found

    def peak_bytes(self, program: Program) -> int:
        return program.peak_bytes()

    def refusal(self, choice: Choice, program: Program) -> tuple[str, str]:
        start, left = time.monotonic(), self.seconds_left() - self._final_seconds
        try:
            with time_limit(left):
                return self._verdicts.refusal(choice, program.run, max(left / 2, 0.0))
        finally:
            kind = _kind(choice.steps[-1])
            self._checking[kind] = max(self._checking[kind], time.monotonic() - start)

    @property
    def _final_seconds(self) -> float:
        """Estimate the seconds to measure a clear winner against the default."""
        return self._duel_seconds(LOOKS[0])

    def _duel_seconds(self, pairs: int) -> float:
        return 2 * (2 + pairs) * max(self._stepping, SHORTEST)

    def expected_seconds(self, step: Step) -> float:
        """Estimate the seconds to compile, measure and check a program, and to measure the winner.

        Compiling takes as long as the longest so far (without the first, which loads what all need), and
        longer for more calls. So do measuring, and checking: the rewrites of a pass are judged as well.
        """
        if not self._tries:
            return math.inf
        compiling = max(self._compiling[1:] or self._compiling) * step.growth
        measuring = max(self._measuring, self._duel_seconds(LOOKS[0]))
        return compiling + measuring + self._checking[_kind(step)] + self._final_seconds


def _kind(step: Step) -> str:
    return "setting" if step.item is None else "pass"
