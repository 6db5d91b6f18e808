"""The stages of a compilation, one method each. All share the same observers, checks, timers and errors."""

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
from fxpasses.graphs.fresh_outputs import copy_fresh_outputs, mark_fresh_outputs
from fxpasses.graphs.provenance import annotate, failing_node, user_input_names
from fxpasses.graphs.rewriting import copy_graph, use_returned_arguments
from fxpasses.partitioner._torch import BackwardState
from fxpasses.pass_manager.manager import PassManager
from fxpasses.regional import KnownRegions, known_regions

log = logging.getLogger(__name__)

_DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    # About data-dependent sizes, which this library traces further than other backends do.
    GuardOnDataDependentSymNode,
    PendingUnbackedSymbolNotFound,
)


@dataclass(frozen=True)
class Participants:
    """Who else takes part in a compilation.

    Attributes:
        compiler: creates the compiler from options, graph and inputs; by default the one that the options
            name.
        observers: see each graph at the end of its stage.
        values: compares the graphs before and after each rewrite when they first run.
        lowered: checks the compiler's work.
        ranks: compares collectives with those of other processes.
        decides: maps a joint graph and the names to save for the backward pass to the names to save instead.
            Applies to regions as well.
        of_region: whether the graph belongs to a region. The enclosing graph's compilation then handles
            failures.
        counts: false for a subgraph of a graph that is already counted.
        advises: whether errors reach a user who passed options to ``torch.compile``.
        regions: the model's regions that are already compiled, by their calls. New ones are added.
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
    """The stages for one graph. :func:`~fxpasses.pipeline.compile_graph.compile_graph` puts them in order."""

    def __init__(self, options: Options, participants: Participants) -> None:
        self._options = options
        self._participants = participants
        self._values = participants.values
        if participants.values is not None:
            participants.values.observers = participants.observers
        self._falls_back = options.on_failure != "raise" and not participants.of_region
        self._manager = PassManager(
            options.passes, [self._values] if self._values else [], structure=options.check != "off"
        )
        self._unmatched = Unmatched(options.asked_for())
        self._input_names: list[str] = []
        self._ran = False
        """Whether any stage has run. AOTAutograd may take the whole result from its cache instead."""

    @contextmanager
    def tracing(self, gm: fx.GraphModule, cached: bool = True) -> Iterator[None]:
        """Time and accelerate the block in which AOTAutograd traces ``gm``.

        With a report, AOTAutograd's cache is off, because a report shows what went through all stages. Args:
        the graph, and whether that cache may be used at all.
        """
        if self._participants.observers or self._values:  # only these show input names to the user
            self._input_names = user_input_names(gm)
        # Code that torch saves for other processes is saved as entries of this cache.
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
        """Run all stages. Unless ``on_failure="raise"``, a graph that fails or turns out wrong runs in eager.

        Args:
            trace: compiles the graph.
            gm: the graph.
            original: the graph that runs in eager instead.

        Raises:
            StageError: if a stage fails and failures are to be raised.
        """
        try:
            compiled = trace()
        except StageError as error:
            self._count_graph()
            return self._fall_back_to_eager(error, original.forward)
        except Exception as error:
            if _torch.is_control_flow(error):
                raise  # Dynamo traces again and comes back with another graph
            self._count_graph()
            failure = CaptureError(describe_error(error), failing_node(error, gm), graph="Dynamo")
            failure.__cause__ = error
            return self._fall_back_to_eager(failure, original.forward)
        self._count_graph()
        if self._participants.counts:
            self._unmatched.warn()
        for observer in self._participants.observers:
            if self._ran:
                observer.done()
            else:
                observer.taken_from_cache()
        if not self._ran and self._participants.counts:
            counters.count("cache_hits")
        return self._eager_if_wrong(self._with_partition_repro(compiled, original), original.forward)

    def traced(self, joint: fx.GraphModule, outputs: int) -> None:
        """Process the traced joint graph. Args: the graph, and how many outputs are the forward graph's."""
        self._ran = True
        mark_fresh_outputs(joint.graph, outputs)
        counters.count("joint")
        annotate(joint, self._input_names)
        for observer in self._participants.observers:
            observer.joint(joint)

    def run_passes(self, gm: fx.GraphModule, kind: Any) -> None:
        """Run the passes for one kind of graph.

        Raises:
            PassError: if a pass fails.
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
        for observer in self._participants.observers:
            observer.runs.extend(runs)
            observer.graph(kind, gm)

    def partition(
        self, joint: fx.GraphModule, compiler: Compiler, joint_inputs: Any, **aot: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split the joint graph. Args: those of AOTAutograd's partition function, and the compiler."""
        if self._values is not None and compiler.partition_keeps_rng(joint):
            self._values.to_be_partitioned(joint)
        if self._participants.decides is not None:
            aot["decides"] = self._participants.decides
        with self._stage(PartitionError, joint, "joint"):
            forward, backward = compiler.partition(joint, joint_inputs, **aot)
        copy_fresh_outputs(joint.graph, forward.graph)
        if self._values is not None:
            self._values.partitioned(forward, backward)
        return forward, backward

    def lower(self, gm: fx.GraphModule, kind: Any, compile: Callable[[], Callable[..., Any]]) -> Any:
        """Run the passes on a graph and compile it.

        Args:
            gm: a forward, backward or inference graph.
            kind: which of the three it is.
            compile: compiles the graph; may change it.

        Raises:
            StageError: if a stage fails and failures are to be raised.
        """
        counters.count(kind)
        if kind == "inference":
            self._ran = True
            annotate(gm, self._input_names)
            mark_fresh_outputs(gm.graph)
        use_returned_arguments(gm)
        # A failing pass, or Inductor, may leave the graph half rewritten, so eager gets a copy made before.
        kept = self._falls_back or (kind == "backward" and _may_depend_on_data(gm.graph))
        eager = with_inductor_rng(copy_graph(gm, constants=True)) if kept else gm
        try:
            self.run_passes(gm, kind)
            compiled = self._compile_and_check(gm, kind, compile)
        except StageError as error:
            run = (
                EagerCode(eager)
                if _torch_inductor.saves_compiled_code()
                else _torch.make_boxed_func(eager.forward)
            )
            compiled = self._fall_back_to_eager(error, run)
        return as_output_code(compiled, "it calls functions that only this process has")

    def lower_backward(
        self, gm: fx.GraphModule, inputs: Sequence[Any], compile: Callable[[], Callable[..., Any]]
    ) -> Any:
        """Like :meth:`lower`, for a backward graph. Args: the graph, its inputs, and what compiles it."""
        if any(isinstance(value, BackwardState) for value in inputs):
            counters.count("backward")
            # It runs inside a captured backward pass, which compiles it or calls it. Inductor cannot call its
            # hooks.
            return as_output_code(_torch.make_boxed_func(with_inductor_rng(gm).forward), "it calls hooks")
        # AOTAutograd may call this as late as the first backward pass, when acceleration is off again and
        # other threads may be compiling.
        with compiling(), accelerated(self._options.accelerate):
            compiled = self.lower(gm, "backward", compile)
        if self._participants.counts:
            self._unmatched.warn()
        return compiled

    def _compile_and_check(
        self, gm: fx.GraphModule, kind: Any, compile: Callable[[], Callable[..., Any]]
    ) -> Any:
        """Compile the graph, and wrap the result in the checks of its first calls."""
        lowered, ranks = self._participants.lowered, self._participants.ranks
        handed_over = copy_graph(gm) if lowered is not None else gm
        gate = ranks.compiling(kind, gm) if ranks is not None else nullcontext(lambda compiled: compiled)
        try:
            with self._stage(HandoverError, gm, kind), gate as gated, lowered_parts() as parts:
                compiled = gated(compile())
        except HandoverError as error:
            if lowered is not None:
                lowered.failed(handed_over, error.__cause__ or error)
            raise
        for observer in self._participants.observers:
            observer.compiled(kind, compiled)
            observer.lowered(kind, parts)
        if lowered is not None:
            compiled = lowered.watch(handed_over, compiled)
        return compiled if self._values is None else self._with_value_checks(kind, compiled)

    def _with_value_checks(self, kind: str, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the compiled graph so that its first calls are checked by value."""

        def graph_before(error: StageError, before: fx.GraphModule) -> Callable[..., Any]:
            return self._fall_back_to_eager(error, before.forward)

        assert self._values is not None
        # A wrong forward graph sends the whole graph to eager (see _eager_if_wrong). For a wrong backward
        # graph it is too late for that, so the graph from before the wrong pass runs instead.
        return self._values.watch(kind, compiled, graph_before if kind == "backward" else None)

    def _with_partition_repro(self, compiled: Callable[..., Any], gm: fx.GraphModule) -> Callable[..., Any]:
        """Wrap ``compiled`` so that an error of the value check about the partition has a repro program."""
        values = self._values
        if values is None:
            return compiled

        def run(*inputs: Any) -> Any:
            try:
                return compiled(*inputs)
            except ValueMismatchError as error:
                if error.pass_name == "partition" and not error.repro:
                    values.explain_partition(error, gm, inputs)
                if self._participants.advises and not self._falls_back:
                    error.advise()
                raise

        return run

    def _eager_if_wrong(self, compiled: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
        """Run ``compiled`` until the value check finds it wrong, then eager, unless failures are raised."""
        if self._values is None or not self._falls_back:
            return compiled
        running = compiled

        def run(*inputs: Any) -> Any:
            nonlocal running
            try:
                return running(*inputs)
            except ValueMismatchError as error:
                running = self._fall_back_to_eager(error, eager)
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

    def _fall_back_to_eager(self, error: StageError, eager: Callable[..., Any]) -> Callable[..., Any]:
        for observer in (
            () if self._participants.of_region else self._participants.observers
        ):  # a failing region may merely be refused
            observer.failed(error)
        if not self._falls_back and not self._depends_on_data(error):
            if self._participants.advises:
                error.advise()
            raise error
        counters.add_fallback(Fallback(error.stage, error.reason, str(error.location)))
        log.warning("running in eager instead: %s", error)
        return eager

    def _depends_on_data(self, error: StageError) -> bool:
        """Whether a graph cannot be compiled because its gradients read values.

        Examples are ``.item()`` in a custom operator's backward formula, and ``x[rows, mask] = v``. With
        other backends, Dynamo leaves such a graph to eager. A backward graph may be lowered long after the
        forward graph ran.
        """
        late = isinstance(error, HandoverError) and error.graph == "backward"
        cause = getattr(error.__cause__, "inner_exception", error.__cause__)  # wrapped by Inductor
        return (
            isinstance(cause, _DATA_DEPENDENT)
            and (late or isinstance(error, CaptureError))
            and self._participants.advises
            and not self._participants.of_region
        )

    def _count_graph(self) -> None:
        if not self._participants.counts:
            return
        counters.count("graphs")
        compile_id = _torch.CompileContext.current_compile_id()
        if compile_id is not None and compile_id.frame_compile_id:
            counters.count("recompiles")


@contextmanager
def _timed(stage: str) -> Iterator[None]:
    """Attribute this block's time to a stage, in our counters, ``torch.profiler`` and ``TORCH_TRACE``."""
    with counters.timed(stage), dynamo_timed(f"fxpasses.{stage}", log_pt2_compile_event=True):
        yield


def _may_depend_on_data(graph: fx.Graph) -> bool:
    """Whether sizes of results, or a number, may depend on data: see :meth:`Stages._depends_on_data`."""
    kinds = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return any(not kinds.isdisjoint(getattr(node.target, "tags", ())) for node in graph.nodes)
