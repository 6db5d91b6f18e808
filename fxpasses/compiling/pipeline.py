"""The stages of the compilation of one Dynamo graph, in order.

::

    Dynamo graph ── AOTAutograd ── joint graph
        joint passes ── partition ── forward graph ── forward passes ── compiler
                                  └─ backward graph ─ backward passes ─ compiler
    Dynamo graph ── AOTAutograd ── inference graph ── inference passes ── compiler   (no gradients needed)

AOTAutograd functionalizes and traces; everything it calls back is a method of :class:`Pipeline`. What
"compiler" is, the pipeline is given: Inductor, the eager graph itself, or a recorder (``fxpasses.capture``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

from torch import fx

from fake.tracing.compiling import compiling
from fxpasses import _torch, _torch_inductor
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
from fxpasses.graphs.provenance import annotate, failing_node
from fxpasses.graphs.rewriting import copy_graph
from fxpasses.partitioner._torch import BackwardState
from fxpasses.pass_manager.manager import PassManager

__all__ = ["Compiler", "Pipeline"]

log = logging.getLogger(__name__)


class Compiler(Protocol):
    """Who turns the partitioned graphs into callables (which take one list of inputs)."""

    def settings(self) -> Any:
        """A context manager that is entered while AOTAutograd runs: settings of torch."""

    def aot_arguments(self) -> dict[str, Any]:
        """Arguments for AOTAutograd: decompositions and the like."""

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, **aot: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split the joint graph."""

    def partition_keeps_rng(self, joint: fx.GraphModule) -> bool:
        """Whether the partition leaves random operators as they are, so that graphs can be compared across it."""

    def forward(self, gm: fx.GraphModule, inputs: Sequence[Any], *, inference: bool) -> Callable[..., Any]:
        """Compile a forward or inference graph.

        Args:
            gm: a functional graph of ATen calls, whose outputs are those of the model and, for a forward graph, the saved values.
            inputs: the fake tensors and symbolic sizes that it was traced with.
            inference: whether there is no backward graph.

        Returns:
            A callable that takes one list of inputs, which it may empty, and returns the outputs in order.
        """

    def backward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a backward graph."""


class Pipeline:
    """The stages for one Dynamo graph, with the same error handling around each."""

    def __init__(
        self,
        options: Options,
        compiler: Compiler,
        observers: Sequence[Observer] = (),
        values: RewriteCheck | None = None,
        *,
        counts: bool = True,
        lowered: LoweringCheck | None = None,
        ranks: RankCheck | None = None,
        advises: bool = False,
    ) -> None:
        """Put the stages together.

        Args:
            options: of the compilation.
            compiler: turns graphs into callables.
            observers: see each graph at the end of its stage.
            values: compares the graphs before and after each rewrite when they first run.
            counts: false for a subgraph of a graph that is counted already.
            lowered: looks at the compiler's work.
            ranks: compares collectives with those of other processes.
            advises: whether errors reach somebody who gave options to ``torch.compile``.
        """
        self._lowered = lowered
        self._ranks = ranks
        self._advises = advises
        self.options = options
        self._counts = counts
        self.compiler = compiler
        self._values = values
        self.manager = PassManager(
            options.passes,
            [self._values] if self._values else [],
            structure=options.check != "off",
        )
        self._unmatched = Unmatched(self.manager.passes)
        self.observers = observers
        self._was_called = False

    @property
    def from_cache(self) -> bool:
        """Whether the last graph came whole from AOTAutograd's cache: no stage has run."""
        return not self._was_called

    def compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], original: fx.GraphModule | None = None
    ) -> Callable[..., Any]:
        """Compile a Dynamo graph into a callable with its calling convention.

        Args:
            gm: the graph.
            example_inputs: its inputs.
            original: the graph that runs instead when the compiled one turns out wrong; ``gm`` by default.

        Raises:
            StageError: naming the stage, the pass, the node and the user's line (with
                ``on_failure="raise"``).
        """
        original = original or gm
        try:
            with (
                compiling(),
                counters.timed("tracing"),
                accelerated(self.options.accelerate, gm),
                self.compiler.settings(),
            ):
                aot = _torch.aot_autograd(
                    fw_compiler=_torch.serializable(self._forward),
                    bw_compiler=_torch.serializable(self._backward),
                    inference_compiler=_torch.serializable(self._inference),
                    partition_fn=self._partition,
                    keep_inference_input_mutations=True,
                    **self.compiler.aot_arguments(),
                )
                compiled = aot(gm, example_inputs)
        except StageError as error:
            self._count_graph()
            return self._eager_instead(error, original.forward)
        except Exception as error:
            if _torch.is_control_flow(error):
                raise  # Dynamo traces again and comes back with another graph
            self._count_graph()
            failure = CaptureError(
                f"{type(error).__name__}: {error}", failing_node(error, gm), graph="Dynamo"
            )
            failure.__cause__ = error
            return self._eager_instead(failure, original.forward)
        self._count_graph()
        if self._counts:
            self._unmatched.tell()
            if self.from_cache:
                counters.count("cache_hits")
        return self._eager_if_wrong(self._with_partition_repro(compiled, original), original.forward)

    def _partition(
        self, joint: fx.GraphModule, joint_inputs: Any, **aot: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self._was_called = True
        counters.count("joint")
        annotate(joint)
        for observer in self.observers:
            observer.joint(joint)
        self._run_passes(joint, "joint")
        if self._values is not None and self.compiler.partition_keeps_rng(joint):
            self._values.to_be_partitioned(joint)
        with self._stage(PartitionError, joint, "joint"):
            forward, backward = self.compiler.partition(joint, joint_inputs, **aot)
        if self._values is not None:
            self._values.partitioned(forward, backward)
        return forward, backward

    def _forward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        counters.count("forward")
        return self._compile_one(gm, "forward", lambda: self.compiler.forward(gm, inputs, inference=False))

    def _backward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        counters.count("backward")
        if any(isinstance(value, BackwardState) for value in inputs):
            # It runs as part of a captured pass, which compiles it, or is called from there: Inductor cannot call its hooks.
            return as_output_code(_torch.make_boxed_func(with_inductor_rng(gm).forward), "it calls hooks")
        # AOTAutograd may come here as late as in the first backward pass, when nothing is accelerated
        # any more and other threads compile.
        with compiling(), accelerated(self.options.accelerate):
            compiled = self._compile_one(gm, "backward", lambda: self.compiler.backward(gm, inputs))
        if self._counts:
            self._unmatched.tell()
        return compiled

    def _inference(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self._was_called = True
        counters.count("inference")
        annotate(gm)
        return self._compile_one(gm, "inference", lambda: self.compiler.forward(gm, inputs, inference=True))

    def _compile_one(self, gm: fx.GraphModule, kind: Any, compile: Callable[[], Callable[..., Any]]) -> Any:
        # A failing pass may leave the graph half rewritten: eager then runs the graph as it was.
        to_eager = self.options.on_failure != "raise"
        eager = with_inductor_rng(copy_graph(gm, constants=True)) if to_eager else gm
        try:
            self._run_passes(gm, kind)
            handed_over = copy_graph(gm) if self._lowered is not None else gm
            ranks = self._ranks.compiling(kind, gm) if self._ranks is not None else nullcontext(_unchanged)
            try:
                with self._stage(HandoverError, gm, kind), ranks as gated:
                    compiled = gated(compile())
            except HandoverError as error:
                if self._lowered is not None:
                    self._lowered.failed(handed_over, error.__cause__ or error)
                raise
            for observer in self.observers:
                observer.compiled(kind, compiled)
            if self._lowered is not None:
                compiled = self._lowered.watch(handed_over, compiled)
            if self._values is not None:
                compiled = self._watched(kind, compiled)
        except StageError as error:
            run = (
                EagerCode(eager)
                if _torch_inductor.saves_compiled_code()
                else _torch.make_boxed_func(eager.forward)
            )
            compiled = self._eager_instead(error, run)
        return as_output_code(compiled, "it calls functions that only this process has")

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
                if self._advises and self.options.on_failure == "raise":
                    error.advise()
                raise

        return run

    def _eager_if_wrong(self, compiled: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
        """``compiled``, until the value check finds it wrong: eager from then on (``on_failure="eager"``)."""
        if self._values is None or self.options.on_failure == "raise":
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

    def _run_passes(self, gm: fx.GraphModule, kind: Any) -> None:
        self._unmatched.before(gm, kind)
        with counters.timed("passes"):
            try:
                runs = self.manager.run(gm, kind)
            except PassError as error:
                if self._values is not None:
                    self._values.explain(error)
                raise
        counters.move_seconds("checks", sum(run.check_seconds for run in runs), from_stage="passes")
        self._unmatched.after(runs, kind)
        for observer in self.observers:
            observer.runs.extend(runs)
            observer.graph(kind, gm)

    @contextmanager
    def _stage(self, failure: type[StageError], gm: fx.GraphModule, kind: str) -> Iterator[None]:
        try:
            with counters.timed(failure.stage):
                yield
        except StageError:
            raise
        except Exception as error:
            if _torch.is_control_flow(error):
                raise
            reason = f"{type(error).__name__}: {error}"
            raise failure(reason, failing_node(error, gm), graph=kind) from error

    def _eager_instead(self, error: StageError, eager: Callable[..., Any]) -> Callable[..., Any]:
        if self.options.on_failure == "raise":
            if self._advises:
                error.advise()
            raise error
        counters.add_fallback(Fallback(error.stage, error.reason, str(error.location)))
        log.warning("running in eager instead (on_failure=%r): %s", self.options.on_failure, error)
        return eager

    def _count_graph(self) -> None:
        if not self._counts:
            return
        counters.count("graphs")
        compile_id = _torch.CompileContext.current_compile_id()
        if compile_id is not None and compile_id.frame_compile_id:
            counters.count("recompiles")


def _unchanged(compiled: Any) -> Any:
    return compiled
