"""Protocols through which stages call checks and reports without importing them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any, Protocol

from torch import Tensor, fx

from fxpasses.compiling.history import Miss
from fxpasses.compiling.options import Options
from fxpasses.errors import PassError, StageError, ValueMismatchError
from fxpasses.pass_manager.pass_base import Check
from fxpasses.pass_manager.runs import PassRun


@dataclass
class Observer:
    """Sees each graph at the end of its stage. Base class of reports and of ``capture``'s recorder."""

    runs: list[PassRun] = field(default_factory=list)

    def dynamo(self, gm: fx.GraphModule, options: Options, earlier: Miss | None = None) -> None:
        """Called with Dynamo's graph, before anything is done with it.

        Args:
            gm: the graph.
            options: the options of the compilation.
            earlier: what differs from the last compilation of the same code, if there was one.
        """

    def joint(self, gm: fx.GraphModule) -> None:
        """Called with the joint graph as AOTAutograd traced it, before any pass. Copy it to keep it."""

    def graph(self, kind: str, gm: fx.GraphModule) -> None:
        """Called with a joint, forward, backward or inference graph after its passes."""

    def compiled(self, kind: str, compiled: Callable[..., Any]) -> None:
        """Called with the compiler's result for the graph of that kind."""

    def lowered(self, kind: str, parts: Sequence[Any]) -> None:
        """Called with Inductor's results for it: one compiled graph, or one per segment between regions."""

    def failed(self, error: StageError) -> None:
        """Called when a stage failed: its graph runs in eager, or ``on_failure="raise"`` raises the error."""

    def done(self) -> None:
        """Called when all is compiled, except a backward graph that may follow when first needed."""

    def guards(self, shape_env: Any, graph: fx.Graph) -> None:
        """Called with the shape environment of Dynamo's graph, once all stages installed their guards."""

    def taken_from_cache(self) -> None:
        """Called when the whole graph came from AOTAutograd's cache, so that no stage ran."""

    def calls_regions(self, before: fx.GraphModule, after: fx.GraphModule) -> None:
        """Called with the graph whose repeated subgraphs became regions, and the graph that calls them."""

    def verdicts(self, found: Mapping[tuple[str, str], str]) -> None:
        """Called with the value check's verdicts so far, by kind of graph and pass name."""

    def regions(self, report: object) -> None:
        """Called with the repeated subgraphs of the Dynamo graph, and which of them became regions."""

    def of_region(self, gm: fx.GraphModule) -> Observer:
        """Return the observer for compiling one region of this graph. Args: the region's Dynamo graph."""
        return Observer()

    def region_check(self, options: Options) -> RegionCheck | None:
        """Return the check that compares one region's graphs before and after each pass, if there is one."""
        return None


class RewriteCheck(Check):
    """Compares the graphs before and after each rewrite when the compiled function first runs.

    Attributes:
        observers: receive the verdicts.
    """

    observers: Sequence[Observer] = ()

    def to_be_partitioned(self, joint: fx.GraphModule) -> None:
        """Remember the joint graph that is about to be partitioned."""
        raise NotImplementedError

    def partitioned(self, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        """Remember the forward and backward graphs that the partition produced."""
        raise NotImplementedError

    def watch(
        self, kind: str, compiled: Callable[..., Any], instead: Callable[[StageError, Any], Any] | None
    ) -> Callable[..., Any]:
        """Wrap ``compiled`` so that its first calls are checked before they run.

        Args:
            kind: the kind of graph that was compiled.
            compiled: the compiled callable; takes one list of inputs.
            instead: called with the error and the graph from before the wrong pass; returns what to run, or
                raises.
        """
        raise NotImplementedError

    def explain(self, error: PassError) -> None:
        """Add a repro file to the error of a pass that raised or left an ill-formed graph."""

    def explain_partition(self, error: ValueMismatchError, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Add a repro file to the error about a wrong partition.

        Args:
            error: the error.
            gm: Dynamo's graph.
            inputs: the arguments of the call.
        """


class RegionCheck(RewriteCheck):
    """The same for a region, whose graphs are compared on the first calls of any of its copies."""

    def watch_backward(self, compiled: Callable[..., Any], gradients: Sequence[Any]) -> Callable[..., Any]:
        """Wrap a compiled backward graph so that its first calls are checked.

        Args:
            compiled: takes a list of sizes, saved tensors and gradients.
            gradients: how to build gradients from its results. A replacement returns the same.
        """
        raise NotImplementedError

    def exact_run(self, gm: fx.GraphModule) -> Any:
        """Return a callable that runs a copy of one of the region's graphs in float64."""
        raise NotImplementedError


class LoweringCheck(Protocol):
    """Compares each compiled graph with an operator-by-operator run of the graph."""

    def watch(self, gm: fx.GraphModule, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``compiled`` so that its first call (with one list of inputs) is compared with ``gm``."""

    def failed(self, gm: fx.GraphModule, error: BaseException) -> None:
        """Called when the compiler raised on ``gm``."""


class RankCheck(Protocol):
    """Compares the collectives of each compiled graph across the ranks of a job, before its first run."""

    def saved(self, joint: fx.GraphModule, names: list[str]) -> list[str]:
        """What the deciding rank saves of a joint graph. On its own, this rank would save ``names``."""

    def compiling(self, kind: str, gm: fx.GraphModule) -> AbstractContextManager[Callable[[Any], Any]]:
        """Context for compiling ``gm``. Yields a function that puts the comparison before the result."""


class Recorder(Protocol):
    """Records the compilations of one call of a compiled function."""

    def observer(self) -> Observer:
        """Return the observer of the graph that Dynamo is handing over."""

    def watched(
        self,
        compiled: Callable[..., Any],
        lifted: Sequence[Tensor] = (),
        graph: fx.Graph | None = None,
        *,
        in_memory: bool = False,
    ) -> Callable[..., Any]:
        """Wrap the backend's result for that graph so that its calls are recorded.

        Args:
            compiled: the result.
            lifted: the tensors that the graph has as attributes.
            graph: Dynamo's graph.
            in_memory: whether it cannot be written to a file.
        """

    def instead_of(self, code: CodeType) -> CodeType | None:
        """The code that a function's frames run from now on, or None to let Dynamo compile ``code``."""

    def depends_on(self, file: Path | None) -> None:
        """Make the record valid only while this file is unchanged. With None, never use it again."""


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def recorder() -> Recorder | None:
    """The recorder of the enclosing block, if any."""
    return _recorder.get()


@contextmanager
def recorded_by(recorder: Recorder | None) -> Iterator[None]:
    """Record what is compiled in this block, or with None, record nothing."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)
