"""Observers of a compilation: the protocols through which stages call checks and reports, which they do not import."""

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
    """Sees each graph at the end of its stage. Base class of reports and of the recorder of ``capture``."""

    runs: list[PassRun] = field(default_factory=list)

    def dynamo(self, gm: fx.GraphModule, options: Options, earlier: Miss | None = None) -> None:
        """Dynamo's graph, before anything is done with it.

        Args:
            gm: the graph.
            options: of the compilation.
            earlier: what differs from the last compilation of the same code, if there was one.
        """

    def joint(self, gm: fx.GraphModule) -> None:
        """The joint graph as AOTAutograd traced it, before any pass. Copy it to keep it."""

    def graph(self, kind: str, gm: fx.GraphModule) -> None:
        """A joint, forward, backward or inference graph after its passes."""

    def compiled(self, kind: str, compiled: Callable[..., Any]) -> None:
        """What the compiler made of the graph of that kind."""

    def lowered(self, kind: str, parts: Sequence[Any]) -> None:
        """What Inductor made of it: one compiled graph, or one for each segment between calls of regions."""

    def failed(self, error: StageError) -> None:
        """A stage failed: what it was given runs in eager, or, with ``on_failure="raise"``, the error is raised."""

    def done(self) -> None:
        """All is compiled but a backward graph, which may follow when it is first needed."""

    def guards(self, shape_env: Any, graph: fx.Graph) -> None:
        """The shape environment of Dynamo's graph, once all stages have installed their guards."""

    def taken_from_cache(self) -> None:
        """The graph came whole from AOTAutograd's cache: no stage has run."""

    def calls_regions(self, before: fx.GraphModule, after: fx.GraphModule) -> None:
        """The graph of which repeated subgraphs became regions, and the one that calls these."""

    def verdicts(self, found: Mapping[tuple[str, str], str]) -> None:
        """What the value check says so far, by kind of graph and name of the pass."""

    def regions(self, report: object) -> None:
        """The repeated subgraphs of the Dynamo graph, and which of them became regions."""

    def of_region(self, gm: fx.GraphModule) -> Observer:
        """The observer of the compilation of one region of this graph. Args: the region's Dynamo graph."""
        return Observer()

    def region_check(self, options: Options) -> RegionCheck | None:
        """The check of the graphs of one region, compiled with ``options``, before and after each pass."""
        return None


class RewriteCheck(Check):
    """Compares the graphs before and after each rewrite when the compiled function first runs.

    Attributes:
        observers: are told the verdicts.
    """

    observers: Sequence[Observer] = ()

    def to_be_partitioned(self, joint: fx.GraphModule) -> None:
        """Remember the joint graph that the partition is given."""
        raise NotImplementedError

    def partitioned(self, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        """Remember the pair that the partition made."""
        raise NotImplementedError

    def watch(
        self, kind: str, compiled: Callable[..., Any], instead: Callable[[StageError, Any], Any] | None
    ) -> Callable[..., Any]:
        """``compiled``, with its first calls checked before they run.

        Args:
            kind: the kind of graph that was compiled.
            compiled: the compiled callable; takes one list of inputs.
            instead: called with the error and the graph before the wrong pass; returns what to run, or raises.
        """
        raise NotImplementedError

    def explain(self, error: PassError) -> None:
        """Add a repro file to the error of a pass that raised, or left a graph that is not well formed."""

    def explain_partition(self, error: ValueMismatchError, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Add a repro file to the error of a wrong partition.

        Args:
            error: the error.
            gm: Dynamo's graph.
            inputs: the arguments of the call.
        """


class RegionCheck(RewriteCheck):
    """The same for a region: its graphs are compared on the first calls of any of its copies."""

    def watch_backward(self, compiled: Callable[..., Any], gradients: Sequence[Any]) -> Callable[..., Any]:
        """A compiled backward graph with its first calls checked.

        Args:
            compiled: takes a list of sizes, saved tensors, gradients.
            gradients: how gradients are made of what it returns: what runs in its place returns the same.
        """
        raise NotImplementedError

    def exact_run(self, gm: fx.GraphModule) -> Any:
        """A callable that runs a copy of a graph of the region in float64."""
        raise NotImplementedError


class LoweringCheck(Protocol):
    """Compares each compiled graph with the graph run operator by operator."""

    def watch(self, gm: fx.GraphModule, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """``compiled``, compared with ``gm`` when it is first called (with one list of inputs)."""

    def failed(self, gm: fx.GraphModule, error: BaseException) -> None:
        """The compiler raised on ``gm``."""


class RankCheck(Protocol):
    """Compares the collectives of each compiled graph between the ranks of a job, before it runs for the first time."""

    def saved(self, joint: fx.GraphModule, names: list[str]) -> list[str]:
        """What the rank that decides saves of a joint graph, of which this one would save ``names``."""

    def compiling(self, kind: str, gm: fx.GraphModule) -> AbstractContextManager[Callable[[Any], Any]]:
        """Within, ``gm`` is compiled; gives the function that puts the comparison before what came out."""


class Recorder(Protocol):
    """Records the compilations of one call of a compiled function."""

    def observer(self) -> Observer:
        """The observer of the graph that Dynamo hands over now."""

    def watched(
        self,
        compiled: Callable[..., Any],
        lifted: Sequence[Tensor] = (),
        graph: fx.Graph | None = None,
        *,
        in_memory: bool = False,
    ) -> Callable[..., Any]:
        """What the backend returns for that graph, with its calls recorded.

        Args:
            compiled: what it returns.
            lifted: the tensors that the graph has as attributes.
            graph: Dynamo's.
            in_memory: whether it cannot be written to a file.
        """

    def instead_of(self, code: CodeType) -> CodeType | None:
        """The code that frames of a function are to run from now on, which Dynamo is about to compile, or None: it compiles."""

    def depends_on(self, file: Path | None) -> None:
        """What is recorded holds as long as this file is as it is; without one, it is not to be used again."""


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def recorder() -> Recorder | None:
    """The recorder of the block around this, if any."""
    return _recorder.get()


@contextmanager
def recorded_by(recorder: Recorder | None) -> Iterator[None]:
    """What is compiled in this block is recorded, or with None is not."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)
