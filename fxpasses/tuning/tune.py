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
from fxpasses.checking._torch_dynamo import compile_apart, nothing_left_behind
from fxpasses.checking.inputs import deep_copy
from fxpasses.checking.progress import ProgressLine
from fxpasses.compiling.options import Options, check_listed_passes
from fxpasses.counters import counters
from fxpasses.errors import OptionsError
from fxpasses.pass_manager.pass_base import Pass
from fxpasses.plans.compile import Compiled
from fxpasses.tuning._torch import is_compiled, is_profiling
from fxpasses.tuning.kept import Kept
from fxpasses.tuning.measuring import wall_clock
from fxpasses.tuning.search import GOALS, Goal
from fxpasses.tuning.tuned_calls import file_of_call, read_call, write_call
from fxpasses.tuning.tuned_graph import choice_of
from fxpasses.tuning.tuning_ledger import Entry, table_of_entries
from fxpasses.tuning.tuning_session import Session

M = TypeVar("M", bound=Callable[..., Any])


@dataclass(frozen=True)
class Tuned(Generic[M]):
    """A tuned model: called like the model. Prints as the ledger.

    Attributes:
        model: the model.
        graphs: what was found, one a graph that Dynamo made.
        seconds: how long it took.
        reused: how many of the graphs were tuned before, and not again.
        interrupted: whether it was stopped early.
        untuned: why graphs were not tuned, one a graph: sizes that are symbolic, a job of several processes.
    """

    model: M
    graphs: tuple[Kept, ...]
    seconds: float
    reused: int
    interrupted: bool
    _compiled: Callable[..., Any]
    untuned: tuple[str, ...] = ()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the model, compiled with what was found."""
        return self._compiled(*args, **kwargs)

    @property
    def ledger(self) -> tuple[Entry, ...]:
        """What was tried, on all graphs."""
        return tuple(entry for kept in self.graphs for entry in kept.entries)

    @property
    def steps(self) -> tuple[str, ...]:
        """The names of the passes and settings that are used, on all graphs."""
        return tuple(step["name"] for kept in self.graphs for step in kept.steps)

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
            for kept in self.graphs:
                if kept.ratio:
                    told = "{:.3f} [{:.3f}, {:.3f}]".format(*kept.ratio)
                    console.print(f"{kept.graph[:8]}: {told} of the default's time", highlight=False)
                if kept.left:
                    console.print(f"{kept.graph[:8]}: no time for {', '.join(kept.left)}", highlight=False)
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
    """Find the passes and options with which a model is fastest, or takes least memory, by measuring them on real inputs.

    Each graph that Dynamo makes is tuned on its own: passes that change it, the memory budget, and options of Inductor are tried against the
    best so far, in turns. What is not clearly better, gives other results or gradients than eager, or has a rewrite that is not proved equal,
    is not used. What was found is kept on disk; a later call, or ``options={"passes": "tuned"}`` in another process, takes it from there. A copy of a
    module runs; a function that is none changes what it holds. With Ctrl-C the best so far is taken.

    Args:
        model: a module or function. Its training step is tuned, or inference within ``torch.no_grad()``.
        inputs: a tensor, or a tuple of positional arguments.
        kwargs: its keyword arguments.
        seconds: how long it may take, tracing and compiling the default included; these are done in any case, and so is the last comparison with it.
        goal: ``"time"``, ``"memory"`` (the peak of a step), or ``"both"``: one of them, and none at the other's expense.
        passes: the passes to choose from; by default those of the library whose results are the same up to rounding.
        allow: passes to choose from as well that compute something else on purpose (``"pack_dropout_rng"``, ``"downcast_saved_activations"``):
            these are measured, and not compared with eager.
        options: other options of :class:`fxpasses.Options`, which stay as they are.
        cache: where results and plans are kept, as for :func:`fxpasses.compile`; the same as ``options={"cache": ...}``.
        fresh: whether to measure again what is kept.
        clock: gives the seconds that are compared: ``time.process_time`` on a machine that others use, too.
        show: whether to say what is being tried, on standard error.

    Raises:
        OptionsError: for a wrong argument, or a pass that holds state of which nothing can be said.
        StageError: when the default cannot be compiled.
    """
    wanted, where = _check(model, kwargs, seconds, goal, options, cache, clock)
    for name, flag in (("fresh", fresh), ("show", show)):
        if not isinstance(flag, bool):
            raise OptionsError(name, flag, "True or False")
    chosen = None if passes is None else _listed("passes", passes)
    allowed = _listed("allow", allow)
    start = time.monotonic()
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    later = Session(seconds=seconds, goal=goal, passes=chosen, allowed=allowed, clock=clock, cache=where)
    file = file_of_call(model, args, kwargs or {}, {**wanted, "passes": later}, where)
    known = None if fresh or file is None else read_call(file)
    if known is not None and all(choice_of(kept, later) for kept in known):
        # Should it be traced into other graphs after all, these are tuned when they first run.
        for _ in known:
            counters.count("tuned_reused")
        compiled = _compiled(model, wanted, later)
        return Tuned(model, tuple(known), time.monotonic() - start, len(known), False, compiled)
    with ProgressLine(show, name="fxpasses.tune") as line:
        one = Session(
            seconds=seconds,
            goal=goal,
            passes=chosen,
            allowed=allowed,
            clock=clock,
            tell=line,
            fresh=fresh,
            cache=where,
        )
        line("compiling the default")
        with nothing_left_behind(), torch.random.fork_rng(), one.searching():
            copied = deep_copy("model", model, "tuned")
            given, named = tree_map(_own, (args, dict(kwargs or {})))
            compile_apart(copied, "fxpasses", options={**wanted, "passes": one})(*given, **named)
    graphs = dict.fromkeys(kept.graph for kept in one.results)
    results = tuple(next(k for k in one.results if k.graph == graph) for graph in graphs)
    if file is not None and not one.interrupted:
        write_call(file, [place.file for place in one.places])
    later.seconds, later.known = 0.0, [*zip(one.places, one.results, strict=True)]
    # The default is called as it is without tuning: through its plan, which a program that may yet be tuned does not have.
    kept = any(found.steps for found in results)
    compiled = _compiled(model, wanted, later if kept else None)
    spent = time.monotonic() - start
    return Tuned(model, results, spent, one.reused, one.interrupted, compiled, tuple(one.untuned))


def _compiled(model: Callable[..., Any], options: dict[str, Any], one: Session | None) -> Callable[..., Any]:
    given = options if one is None else {**options, "passes": one}
    return torch.compile(model, backend="fxpasses", options=given)


def _own(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return deep_copy("inputs", value, "tuned")
    return value.detach().clone().requires_grad_(value.requires_grad)


def _listed(name: str, value: Any) -> tuple[Pass, ...]:
    found = check_listed_passes(name, value)
    for item in found:
        if item.identify().digest is None:
            problem = f"option {name!r}: pass {item.name!r} holds state, and could not be told from another one later: {', '.join(item.identify().unknown)}"
            raise OptionsError(name, str(item), problem=problem)
    return found


def _check(
    model: Any, kwargs: Any, seconds: Any, goal: Any, options: Any, cache: Any, clock: Any
) -> tuple[dict[str, Any], str]:
    """The options, and where results are kept, which is one of them."""
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
        told = clock()
    except TypeError:  # it is no function, or one of arguments
        told = None
    if not isinstance(told, (int, float)) or isinstance(told, bool):
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
    given = {"cache": cache, **(options or {})}
    there = Options.parse({**given, "passes": "tuned"}).cache
    if os.fspath(cache) not in ("auto", there):
        problem = f"cache={cache!r} and options={{'cache': {there!r}}} name two places for results: give one of them"
        raise OptionsError("cache", cache, problem=problem)
    return {**given, "cache": there}, there
