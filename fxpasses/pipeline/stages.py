"""The stages of a compilation, one method each, with the same observers, checks, times and errors around all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fake.error_text import describe_error
from fake.errors import DataDependentOutputException, DynamicOutputShapeException
from fake.seam.dynamo import dynamo_timed
from fake.seam.symbolic_shapes import GuardOnDataDependentSymNode, PendingUnbackedSymbolNotFound
from fake.tracing.compiling import compiling
from fxpasses import _torch
from fxpasses.compiling import _torch_inductor
from fxpasses.compiling.graph_compilers import Compiler, lowered_parts
from fxpasses.compiling.inductor_rng import with_inductor_rng
from fxpasses.compiling.observing import LoweringCheck, Observer, RankCheck, RewriteCheck
from fxpasses.compiling.options import Options
from fxpasses.compiling.saved_code import EagerCode, as_output_code
from fxpasses.compiling.unmatched import Unmatched
from fxpasses.counters import Fallback, counters
from fxpasses.dynamo.tracing import accelerated
from fxpasses.errors import (
    CaptureError,
    HandoverError,
    PartitionError,
    PassError,
    StageError,
    ValueMismatchError,
)
from fxpasses.graphs.fresh_outputs import hand_fresh_outputs_on, mark_fresh_outputs
from fxpasses.graphs.provenance import annotate, described_inputs, failing_node
from fxpasses.graphs.rewriting import copy_graph, use_returned_arguments
from fxpasses.partitioner._torch import BackwardState
from fxpasses.pass_manager.manager import PassManager
from fxpasses.regional import KnownRegions, known_regions

log = logging.getLogger(__name__)

_DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    # Of sizes that depend on data, which this library traces further than other backends.
    GuardOnDataDependentSymNode,
    PendingUnbackedSymbolNotFound,
)


@dataclass(frozen=True)
class Hooks:
    """What others have to do with a compilation.

    Attributes:
        compiler: makes what turns graphs into callables, of options, graph and inputs; the one that the options name by default.
        observers: see each graph at the end of its stage.
        values: compares the graphs before and after each rewrite when they first run.
        lowered: looks at the compiler's work.
        ranks: compares collectives with those of other processes.
        decides: what is saved for the backward pass: of a joint graph and names, other names; for regions as well.
        of_region: whether the graph is a region's: whoever compiles the graph around it deals with failures.
        counts: false for a subgraph of a graph that is counted already.
        advises: whether errors reach somebody who gave options to ``torch.compile``.
        regions: those of one model that are compiled already, by their calls: new ones are added.
    """

    compiler: Callable[[Options, fx.GraphModule, Sequence[Any]], Compiler] | None = None
    observers: Sequence[Observer] = ()
    values: RewriteCheck | None = None
    lowered: LoweringCheck | None = None
    ranks: RankCheck | None = None
    decides: Callable[[fx.GraphModule, list[str]], list[str]] | None = None
    of_region: bool = False
    counts: bool = True
    advises: bool = False
    regions: KnownRegions = field(default_factory=known_regions)


class Stages:
    """The stages for one graph: :func:`~fxpasses.pipeline.compile_graph.compile_graph` puts them in order."""

    def __init__(self, options: Options, hooks: Hooks) -> None:
        self._options = options
        self._hooks = hooks
        self._values = hooks.values
        if hooks.values is not None:
            hooks.values.observers = hooks.observers
        self._to_eager = options.on_failure != "raise" and not hooks.of_region
        self._manager = PassManager(
            options.passes, [self._values] if self._values else [], structure=options.check != "off"
        )
        self._unmatched = Unmatched(options.asked_for())
        self._inputs: list[str] = []
        self._ran = False
        """Whether any stage has run; AOTAutograd may take the whole from its cache."""

    @contextmanager
    def tracing(self, gm: fx.GraphModule, cached: bool = True) -> Iterator[None]:
        """A block in which AOTAutograd traces ``gm``, timed and accelerated.

        A report is of what went through all stages, not of a cache. Args: the graph, and whether AOTAutograd's cache may be asked at all.
        """
        if self._hooks.observers or self._values:  # who tells the user of them
            self._inputs = described_inputs(gm)
        # What is saved whole for other processes is what would be in the cache.
        whole = (
            _torch.functorch_config.patch(enable_autograd_cache=False)
            if (self._options.report or not cached) and not _torch_inductor.saves_compiled_code()
            else nullcontext()
        )
        with compiling(), _timed("tracing"), accelerated(self._options.accelerate, gm), whole:
            yield

    def run(
        self, trace: Callable[[], Callable[..., Any]], gm: fx.GraphModule, original: fx.GraphModule
    ) -> Callable[..., Any]:
        """Run all stages; with ``on_failure="eager"`` the graph itself takes the place of what fails or turns out wrong.

        Args:
            trace: compiles the graph.
            gm: the graph.
            original: the graph that runs instead.

        Raises:
            StageError: when a stage fails, and failures are to be raised.
        """
        try:
            compiled = trace()
        except StageError as error:
            self._count_graph()
            return self._eager_instead(error, original.forward)
        except Exception as error:
            if _torch.is_control_flow(error):
                raise  # Dynamo traces again and comes back with another graph
            self._count_graph()
            failure = CaptureError(describe_error(error), failing_node(error, gm), graph="Dynamo")
            failure.__cause__ = error
            return self._eager_instead(failure, original.forward)
        self._count_graph()
        if self._hooks.counts:
            self._unmatched.tell()
        for observer in self._hooks.observers:
            if self._ran:
                observer.done()
            else:
                observer.taken_from_cache()
        if not self._ran and self._hooks.counts:
            counters.count("cache_hits")
        return self._eager_if_wrong(self._with_partition_repro(compiled, original), original.forward)

    def traced(self, joint: fx.GraphModule, outputs: int) -> None:
        """The joint graph is traced. Args: the graph, and how many of its first outputs are the forward graph's."""
        self._ran = True
        mark_fresh_outputs(joint.graph, outputs)
        counters.count("joint")
        annotate(joint, self._inputs)
        for observer in self._hooks.observers:
            observer.joint(joint)

    def run_passes(self, gm: fx.GraphModule, kind: Any) -> None:
        """Run the passes for one kind of graph.

        Raises:
            PassError: when one fails.
        """
        self._unmatched.before(gm, kind)
        with _timed("passes"):
            try:
                runs = self._manager.run(gm, kind)
            except PassError as error:
                if self._values is not None:
                    self._values.explain(error)
                raise
        counters.move_seconds("checks", sum(run.check_seconds for run in runs), from_stage="passes")
        self._unmatched.after(runs, kind)
        for observer in self._hooks.observers:
            observer.runs.extend(runs)
            observer.graph(kind, gm)

    def partition(
        self, joint: fx.GraphModule, compiler: Compiler, joint_inputs: Any, **aot: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split the joint graph. Args: those of AOTAutograd's partition function, and the compiler."""
        if self._values is not None and compiler.partition_keeps_rng(joint):
            self._values.to_be_partitioned(joint)
        if self._hooks.decides is not None:
            aot["decides"] = self._hooks.decides
        with self._stage(PartitionError, joint, "joint"):
            forward, backward = compiler.partition(joint, joint_inputs, **aot)
        hand_fresh_outputs_on(joint.graph, forward.graph)
        if self._values is not None:
            self._values.partitioned(forward, backward)
        return forward, backward

    def lower(self, gm: fx.GraphModule, kind: Any, compile: Callable[[], Callable[..., Any]]) -> Any:
        """Run the passes of a graph and compile it.

        Args:
            gm: a forward, backward or inference graph.
            kind: which of these.
            compile: compiles it; may change it.

        Raises:
            StageError: when a stage fails, and failures are to be raised.
        """
        counters.count(kind)
        if kind == "inference":
            self._ran = True
            annotate(gm, self._inputs)
            mark_fresh_outputs(gm.graph)
        use_returned_arguments(gm)
        # A failing pass, or Inductor, may leave the graph half rewritten: eager then runs the graph as it was.
        kept = self._to_eager or (kind == "backward" and _may_depend_on_data(gm.graph))
        eager = with_inductor_rng(copy_graph(gm, constants=True)) if kept else gm
        try:
            self.run_passes(gm, kind)
            compiled = self._handed_over(gm, kind, compile)
        except StageError as error:
            run = (
                EagerCode(eager)
                if _torch_inductor.saves_compiled_code()
                else _torch.make_boxed_func(eager.forward)
            )
            compiled = self._eager_instead(error, run)
        return as_output_code(compiled, "it calls functions that only this process has")

    def lower_backward(
        self, gm: fx.GraphModule, inputs: Sequence[Any], compile: Callable[[], Callable[..., Any]]
    ) -> Any:
        """The same for a backward graph. Args: the graph, its inputs, and what compiles it."""
        if any(isinstance(value, BackwardState) for value in inputs):
            counters.count("backward")
            # It runs as part of a captured pass, which compiles it, or is called from there: Inductor cannot call its hooks.
            return as_output_code(_torch.make_boxed_func(with_inductor_rng(gm).forward), "it calls hooks")
        # AOTAutograd may come here as late as in the first backward pass, when nothing is accelerated
        # any more and other threads compile.
        with compiling(), accelerated(self._options.accelerate):
            compiled = self.lower(gm, "backward", compile)
        if self._hooks.counts:
            self._unmatched.tell()
        return compiled

    def _handed_over(self, gm: fx.GraphModule, kind: Any, compile: Callable[[], Callable[..., Any]]) -> Any:
        """The graph, compiled, with the checks of its first calls around it."""
        lowered, ranks = self._hooks.lowered, self._hooks.ranks
        handed_over = copy_graph(gm) if lowered is not None else gm
        gate = ranks.compiling(kind, gm) if ranks is not None else nullcontext(_unchanged)
        try:
            with self._stage(HandoverError, gm, kind), gate as gated, lowered_parts() as parts:
                compiled = gated(compile())
        except HandoverError as error:
            if lowered is not None:
                lowered.failed(handed_over, error.__cause__ or error)
            raise
        for observer in self._hooks.observers:
            observer.compiled(kind, compiled)
            observer.lowered(kind, parts)
        if lowered is not None:
            compiled = lowered.watch(handed_over, compiled)
        return compiled if self._values is None else self._watched(kind, compiled)

    def _watched(self, kind: str, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled graph with its first calls checked by value."""

        def graph_before(error: StageError, before: fx.GraphModule) -> Callable[..., Any]:
            return self._eager_instead(error, before.forward)

        assert self._values is not None
        # A wrong forward graph leaves the whole to eager (see _eager_if_wrong); for a wrong backward graph it is
        # too late for that: the graph before the wrong pass runs instead.
        return self._values.watch(kind, compiled, graph_before if kind == "backward" else None)

    def _with_partition_repro(self, compiled: Callable[..., Any], gm: fx.GraphModule) -> Callable[..., Any]:
        """``compiled``; when the value check finds the partition wrong, its error points to a small program."""
        values = self._values
        if values is None:
            return compiled

        def run(*inputs: Any) -> Any:
            try:
                return compiled(*inputs)
            except ValueMismatchError as error:
                if error.pass_name == "partition" and not error.repro:
                    values.explain_partition(error, gm, inputs)
                if self._hooks.advises and not self._to_eager:
                    error.advise()
                raise

        return run

    def _eager_if_wrong(self, compiled: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
        """``compiled``, until the value check finds it wrong: eager from then on (``on_failure="eager"``)."""
        if self._values is None or not self._to_eager:
            return compiled
        running = compiled

        def run(*inputs: Any) -> Any:
            nonlocal running
            try:
                return running(*inputs)
            except ValueMismatchError as error:
                running = self._eager_instead(error, eager)
                return running(*inputs)

        return run

    @contextmanager
    def _stage(self, failure: type[StageError], gm: fx.GraphModule, kind: str) -> Iterator[None]:
        try:
            with _timed(failure.stage):
                yield
        except StageError:
            raise
        except Exception as error:
            if _torch.is_control_flow(error):
                raise
            reason = describe_error(error)
            raise failure(reason, failing_node(error, gm), graph=kind) from error

    def _eager_instead(self, error: StageError, eager: Callable[..., Any]) -> Callable[..., Any]:
        for observer in (
            () if self._hooks.of_region else self._hooks.observers
        ):  # a region that fails may be refused only
            observer.failed(error)
        if not self._to_eager and not self._depends_on_data(error):
            if self._hooks.advises:
                error.advise()
            raise error
        counters.add_fallback(Fallback(error.stage, error.reason, str(error.location)))
        log.warning("running in eager instead: %s", error)
        return eager

    def _depends_on_data(self, error: StageError) -> bool:
        """Whether a graph cannot be compiled as its gradients read values: ``.item()`` in a custom operator's backward formula, ``x[rows, mask] = v``.

        With other backends Dynamo leaves such a graph to eager. A backward graph can be lowered long after the forward graph ran.
        """
        late = isinstance(error, HandoverError) and error.graph == "backward"
        cause = getattr(error.__cause__, "inner_exception", error.__cause__)  # in Inductor's own error
        return (
            isinstance(cause, _DATA_DEPENDENT)
            and (late or isinstance(error, CaptureError))
            and self._hooks.advises
            and not self._hooks.of_region
        )

    def _count_graph(self) -> None:
        if not self._hooks.counts:
            return
        counters.count("graphs")
        compile_id = _torch.CompileContext.current_compile_id()
        if compile_id is not None and compile_id.frame_compile_id:
            counters.count("recompiles")


@contextmanager
def _timed(stage: str) -> Iterator[None]:
    """The time of this block belongs to a stage: in our counters, in ``torch.profiler``, and where ``TORCH_TRACE`` writes."""
    with counters.timed(stage), dynamo_timed(f"fxpasses.{stage}", log_pt2_compile_event=True):
        yield


def _may_depend_on_data(graph: fx.Graph) -> bool:
    """Whether the sizes of a result, or a number, may depend on the values of a tensor: see :meth:`Stages._depends_on_data`."""
    kinds = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return any(not kinds.isdisjoint(getattr(node.target, "tags", ())) for node in graph.nodes)


def _unchanged(compiled: Any) -> Any:
    return compiled
