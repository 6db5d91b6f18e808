"""``fxpasses.tune``: find the best passes and options for a model by measuring them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fake.seam.pytree import tree_map
from fxpasses.checking.bisecting.progress import ProgressLine
from fxpasses.checking.execution.inputs import deep_copy
from fxpasses.checking.stages._torch_dynamo import compile_isolated, discard_dynamo_state
from fxpasses.compiling.options import Options, check_listed_passes
from fxpasses.counters import counters
from fxpasses.errors import OptionsError
from fxpasses.pass_manager.pass_base import Pass
from fxpasses.plans.compile import Compiled
from fxpasses.tuning._torch import is_compiled, is_profiling
from fxpasses.tuning.kept import TuningResult
from fxpasses.tuning.measuring import wall_clock
from fxpasses.tuning.search import GOALS, Goal
from fxpasses.tuning.tuned_calls import file_of_call, read_call, write_call
from fxpasses.tuning.tuned_graph import valid_choice
from fxpasses.tuning.tuning_ledger import Entry, table_of_entries
from fxpasses.tuning.tuning_session import Session

M = TypeVar("M", bound=Callable[..., Any])


@dataclass(frozen=True)
class Tuned(Generic[M]):
    """A tuned model. Call it like the model; printing it shows the ledger.

    Attributes:
        model: the model.
        graphs: the result for each graph that Dynamo made.
        seconds: how long tuning took.
        reused: how many graphs used the result of an earlier tuning.
        interrupted: whether tuning was stopped early.
        untuned: the reason for each graph that was not tuned, such as symbolic sizes or a job of several
            processes.
    """

    model: M
    graphs: tuple[TuningResult, ...]
    seconds: float
    reused: int
    interrupted: bool
    _compiled: Callable[..., Any]
    untuned: tuple[str, ...] = ()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the model, compiled with the passes and options that were found."""
        return self._compiled(*args, **kwargs)

    @property
    def ledger(self) -> tuple[Entry, ...]:
        """The entries of all graphs: what was tried."""
        return tuple(entry for result in self.graphs for entry in result.entries)

    @property
    def steps(self) -> tuple[str, ...]:
        """The names of the passes and settings in use, on all graphs."""
        return tuple(step["name"] for result in self.graphs for step in result.steps)

    def __rich__(self) -> Table:
        before = f", {self.reused} tuned before" if self.reused else ""
        title = f"{len(self.graphs)} graphs{before}, {self.seconds:.1f} s; kept: {', '.join(self.steps) or 'the default'}"
        return table_of_entries(self.ledger, title)

    def __str__(self) -> str:
        console = Console(width=160, force_terminal=False)
        with console.capture() as captured:
            console.print(self)
            for why in dict.fromkeys(self.untuned):
                console.print(f"not tuned: {why}", highlight=False, markup=False)
            for result in self.graphs:
                if result.ratio:
                    ratio = "{:.3f} [{:.3f}, {:.3f}]".format(*result.ratio)
                    console.print(f"{result.graph[:8]}: {ratio} of the default's time", highlight=False)
                if result.left:
                    console.print(
                        f"{result.graph[:8]}: no time for {', '.join(result.left)}", highlight=False
                    )
        return captured.get()


def tune(
    model: M,
    inputs: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    seconds: float = 60.0,
    goal: Goal = "time",
    passes: Sequence[Pass | str] | None = None,
    allow: Sequence[Pass | str] = (),
    options: Mapping[str, Any] | None = None,
    cache: str | os.PathLike[str] = "auto",
    fresh: bool = False,
    clock: Callable[[], float] = wall_clock,
    show: bool = True,
) -> Tuned[M]:
    """Find the passes and options that make a model fastest, or smallest in memory, by measuring them.

    Each graph that Dynamo makes is tuned on its own, on real inputs. Passes that change it, the memory budget
    and Inductor options are each measured in turns against the best so far. A candidate is rejected if it is
    not clearly better, if its results or gradients differ from eager, or if one of its rewrites is not proved
    equal.

    The result is kept on disk. A later call, or ``options={"passes": "tuned"}`` in another process, reads it
    from there. A module is copied before it runs; a plain function mutates the state it holds. Ctrl-C keeps
    the best so far, and a later call goes on.

    Args:
        model: a module or function. Its training step is tuned, or inference within ``torch.no_grad()``.
        inputs: a tensor, or a tuple of positional arguments.
        kwargs: its keyword arguments.
        seconds: the time limit. It includes tracing and compiling the default; these always run, as does a
            last comparison with it if something is faster. A program that is being compiled is not stopped.
        goal: ``"time"``, ``"memory"`` (the peak of a step), or ``"both"``: better in one, and not worse in
            the other.
        passes: the passes to choose from. By default, those of the library that preserve results up to
            rounding.
        allow: further passes to choose from that change results on purpose (``"pack_dropout_rng"``,
            ``"downcast_saved_activations"``). These are measured, but not compared with eager.
        options: other options of :class:`fxpasses.Options`, which stay fixed.
        cache: where results and plans are kept, as for :func:`fxpasses.compile`; the same as
            ``options={"cache": ...}``.
        fresh: whether to measure again instead of reusing kept results.
        clock: returns the seconds that are compared. Use ``time.process_time`` on a machine shared with
            others.
        show: whether to report progress on standard error.

    Raises:
        OptionsError: an argument is invalid, or a pass holds state that cannot be identified.
        StageError: the default cannot be compiled.
    """
    checked_options, cache_setting = _check_arguments(model, kwargs, seconds, goal, options, cache, clock)
    for name, flag in (("fresh", fresh), ("show", show)):
        if not isinstance(flag, bool):
            raise OptionsError(name, flag, "True or False")
    chosen = None if passes is None else _parse_passes("passes", passes)
    allowed = _parse_passes("allow", allow)
    start = time.monotonic()
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    later_session = Session(
        seconds=seconds, goal=goal, passes=chosen, allowed=allowed, clock=clock, cache=cache_setting
    )
    file = file_of_call(
        model, args, kwargs or {}, {**checked_options, "passes": later_session}, cache_setting
    )
    known = None if fresh or file is None else read_call(file)
    if known is not None and all(valid_choice(kept, later_session) for kept in known):
        # If Dynamo traces the model into other graphs after all, they are tuned when they first run.
        for _ in known:
            counters.count("tuned_reused")
        compiled = _compile(model, checked_options, later_session)
        return Tuned(model, tuple(known), time.monotonic() - start, len(known), False, compiled)
    with ProgressLine(show, name="fxpasses.tune") as line:
        session = Session(
            seconds=seconds,
            goal=goal,
            passes=chosen,
            allowed=allowed,
            clock=clock,
            report_progress=line,
            fresh=fresh,
            cache=cache_setting,
        )
        line("compiling the default")
        with discard_dynamo_state(), torch.random.fork_rng(), session.count_time():
            copied = deep_copy("model", model, "tuned")
            copied_args, copied_kwargs = tree_map(_copy_input, (args, dict(kwargs or {})))
            compile_isolated(copied, "fxpasses", options={**checked_options, "passes": session})(
                *copied_args, **copied_kwargs
            )
    if not session.results and not session.untuned:
        session.untuned.append("Dynamo made no graph of the model: all of it runs in eager")
    graphs = dict.fromkeys(kept.graph for kept in session.results)
    results = tuple(next(k for k in session.results if k.graph == graph) for graph in graphs)
    if file is not None and not session.interrupted:
        write_call(file, [location.file for location in session.locations])
    later_session.seconds, later_session.known = 0.0, [*zip(session.locations, session.results, strict=True)]
    # Without a better choice, call the default as if nothing had been tuned. Then it can run from its plan.
    # A program that may still be tuned has none.
    kept = any(found.steps for found in results)
    compiled = _compile(model, checked_options, later_session if kept else None)
    spent = time.monotonic() - start
    return Tuned(model, results, spent, session.reused, session.interrupted, compiled, tuple(session.untuned))


def _compile(
    model: Callable[..., Any], options: dict[str, Any], session: Session | None
) -> Callable[..., Any]:
    merged_options = options if session is None else {**options, "passes": session}
    return torch.compile(model, backend="fxpasses", options=merged_options)


def _copy_input(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return deep_copy("inputs", value, "tuned")
    return value.detach().clone().requires_grad_(value.requires_grad)


def _parse_passes(name: str, value: Any) -> tuple[Pass, ...]:
    found = check_listed_passes(name, value)
    for item in found:
        if item.identify().digest is None:
            problem = f"option {name!r}: pass {item.name!r} holds state, and could not be told from another one later: {', '.join(item.identify().unknown)}"
            raise OptionsError(name, str(item), problem=problem)
    return found


def _check_arguments(
    model: Any, kwargs: Any, seconds: Any, goal: Any, options: Any, cache: Any, clock: Any
) -> tuple[dict[str, Any], str]:
    """Return the validated options and the directory for results, which is one of them."""
    if not callable(model):
        raise OptionsError("model", model, "a module or function")
    if is_compiled(model) or isinstance(model, (Compiled, Tuned)):
        problem = "the model is compiled already: give what was compiled"
        raise OptionsError("model", type(model).__name__, problem=problem)
    if goal in GOALS and goal != "time" and is_profiling():
        problem = f"goal={goal!r} measures memory with torch's profiler, and one is running: tune outside of it, or with goal='time'"
        raise OptionsError("goal", goal, problem=problem)
    if not isinstance(kwargs, Mapping | None) or not all(isinstance(name, str) for name in kwargs or ()):
        raise OptionsError("kwargs", kwargs, "the model's keyword arguments by name")
    try:
        reading = clock()
    except TypeError:  # not callable, or it needs arguments
        reading = None
    if not isinstance(reading, (int, float)) or isinstance(reading, bool):
        problem = "a function without arguments that returns seconds, such as time.process_time"
        raise OptionsError("clock", clock, problem)
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not seconds >= 0:
        raise OptionsError("seconds", seconds, "a number of seconds, at least 0")
    if goal not in GOALS:
        raise OptionsError.for_choice("goal", goal, GOALS)
    if not isinstance(options, Mapping | None):
        raise OptionsError("options", options, "options by name")
    if options is not None and "passes" in options:
        raise OptionsError("options", "passes", "no passes: name those to choose from with passes=[...]")
    if not isinstance(cache, (str, os.PathLike)):
        raise OptionsError("cache", cache, "'auto', 'off' or a directory")
    merged_options = {"cache": cache, **(options or {})}
    cache_setting = Options.parse({**merged_options, "passes": "tuned"}).cache
    if os.fspath(cache) not in ("auto", cache_setting):
        problem = f"cache={cache!r} and options={{'cache': {cache_setting!r}}} name two places for results: give one of them"
        raise OptionsError("cache", cache, problem=problem)
    return {**merged_options, "cache": cache_setting}, cache_setting
