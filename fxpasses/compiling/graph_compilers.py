"""Compilers of partitioned graphs: Inductor, or eager runs of the graph itself."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx

from fake.tracing.compiling import compiling
from fxpasses import _torch
from fxpasses.compiling import _torch_inductor
from fxpasses.compiling.compiled_segments import (
    Cut,
    FindCallable,
    changed_strides,
    cut_into_segments,
    name_in_whole,
    segment_module,
    stitch_segments,
    with_strides,
)
from fxpasses.compiling.environment import own_source
from fxpasses.compiling.fixed_sizes import FixedSizes, fixed_graph, inputs_from_hints
from fxpasses.compiling.isolation import Isolation, NotIsolated
from fxpasses.compiling.options import Options
from fxpasses.compiling.saved_code import EagerCode, unsaved
from fxpasses.compiling.shared_kernels import one_unit, use_shared_units
from fxpasses.counters import counters
from fxpasses.graphs.aliasing import is_random
from fxpasses.graphs.decompositions import decompositions
from fxpasses.graphs.fresh_outputs import keep_outputs_fresh, mark_fresh_outputs
from fxpasses.graphs.rewriting import copy_graph
from fxpasses.partitioner import partition
from fxpasses.partitioner._torch import default_partition, min_cut_rematerialization_partition
from fxpasses.pass_manager.limits import limited_lowerings

log = logging.getLogger(__name__)

aten = torch.ops.aten

_POST_PASS = "post_grad_custom_post_pass"

_parts: ContextVar[list[LoweredPart] | None] = ContextVar("inductor_parts", default=None)


class LoweredPart(NamedTuple):
    """Inductor's result for a graph, or for a segment of one.

    Attributes:
        compiled: the result.
        names: maps each of its nodes to the node's name in the whole graph.
        from_cache: whether it came from Inductor's cache.
    """

    compiled: Any
    names: Mapping[str, str]
    from_cache: bool


@contextlib.contextmanager
def lowered_parts() -> Iterator[list[LoweredPart]]:
    """Yields a list that collects Inductor's compiled graphs, including those of segments."""
    found: list[LoweredPart] = []
    before = _parts.set(found)
    try:
        yield found
    finally:
        _parts.reset(before)


@dataclass(frozen=True)
class Partitioner(_torch.CustomPartitionerFn):
    """Our partition function in the form that Inductor accepts.

    Inductor and AOTAutograd both include ``uuid()`` in their cache keys. It stands for everything of ours
    that affects the result: our source, the passes and the options.
    """

    memory_budget: float | None
    digest: str | None
    curve: bool = False
    whose: str = "fxpasses"

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        if (
            self.whose == "torch" and "decides" not in kwargs
        ):  # tuning may choose this even if ranks must agree
            budget = {} if self.memory_budget is None else {"activation_memory_budget": self.memory_budget}
            with _torch.functorch_config.patch(budget):
                return min_cut_rematerialization_partition(
                    gm, joint_inputs, **{"compiler": "inductor", **kwargs}
                )
        return partition(gm, joint_inputs, memory_budget=self.memory_budget, curve=self.curve, **kwargs)

    def uuid(self) -> str | None:
        return self.digest


def partitioner_of(options: Options, digest: str | None) -> Partitioner:
    """The partitioner that the options name. Args: the options, and a hash of our part of the compilation."""
    return Partitioner(options.memory_budget, digest, bool(options.report), options.partition)


class _KeepOutputsFresh(_torch.CustomGraphPass):
    """Runs :func:`keep_outputs_fresh` after Inductor's passes, which drop copies. Depends on nothing else."""

    def __call__(self, graph: fx.Graph) -> None:
        keep_outputs_fresh(graph)

    def uuid(self) -> str:
        return own_source()


class Compiler(Protocol):
    """Turns the partitioned graphs into callables, which take one list of inputs."""

    def settings(self) -> Any:
        """A context manager with torch settings, entered while AOTAutograd runs."""

    def aot_arguments(self) -> dict[str, Any]:
        """Arguments for AOTAutograd, such as decompositions."""

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, **aot: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split the joint graph."""

    def partition_keeps_rng(self, joint: fx.GraphModule) -> bool:
        """Whether the partition preserves random operators, so that graphs can be compared across it."""

    def forward(
        self, gm: fx.GraphModule, inputs: Sequence[Any], *, inference: bool, visible: int | None = None
    ) -> Callable[..., Any]:
        """Compile a forward or inference graph.

        Args:
            gm: a functional graph of ATen calls. Its outputs are those of the model and, for a forward graph,
                the saved values.
            inputs: the fake tensors and symbolic sizes that it was traced with.
            inference: whether there is no backward graph.
            visible: how many of the first outputs keep their traced strides; by default the model's outputs.

        Returns:
            A callable that takes one list of inputs, which it may empty, and returns the outputs in order.
        """

    def backward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a backward graph."""


class InductorCompiler:
    """Compiles with Inductor's own entry points, one state per Dynamo graph.

    Args:
        options: the options of the compilation.
        gm: the graph.
        example_inputs: its inputs.
        compiled_callable: returns the callable of an already compiled call, and ``None`` for other calls.
    """

    def __init__(
        self,
        options: Options,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        compiled_callable: FindCallable = lambda node: None,
    ) -> None:
        partitioner = partitioner_of(options, cache_identity(options))
        self.patches = {**options.inductor_patches(), "custom_partitioner_fn": partitioner}
        if partitioner.digest is None:
            self.patches |= {"fx_graph_cache": False, "fx_graph_remote_cache": False}
        self._example_inputs = example_inputs
        self._num_inputs = len(example_inputs)
        self._num_outputs = _torch.get_num_model_outputs(gm)
        self._compiled_callable = compiled_callable
        self._repro_directory = options.repro_directory() if options.on_failure == "isolate" else None
        """The directory for repro files of calls that Inductor cannot lower, if these are to run in eager."""
        self._repros: dict[tuple[str, str], str] = {}
        self._dynamo_graph = gm
        with self._patched():
            self._config_extra = _torch.new_compiler_extra(gm)
            self._wrapper_arguments = _torch.wrapper_arguments()

    def _inner_compile(self, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        """Inductor's inner compiler, under our settings: a late backward graph finds nothing patched."""
        keep_outputs_fresh(gm.graph)
        found = (
            None
            if _torch.inductor_config.triton.cudagraphs
            else cut_into_segments(gm, self._compiled_callable)
        )
        if found is not None:
            return self._compile_segments(found, inputs, kwargs)
        if self._repro_directory is None:
            return self._lower(gm, inputs, kwargs, lambda: None)
        return self._lower_or_isolate(gm, inputs, kwargs, self._repro_directory)

    def _lower_or_isolate(
        self, gm: fx.GraphModule, inputs: Sequence[Any], kwargs: dict[str, Any], repros: Path
    ) -> Callable[[list[Any]], Any]:
        """Compile the graph. If Inductor fails, compile what it can, and run the rest in eager."""
        kept, late = copy_graph(gm), False  # Inductor rewrites its input

        def generated() -> None:
            nonlocal late
            late = True

        try:
            return self._lower(gm, inputs, kwargs, generated)
        except Exception as error:
            if _torch.is_control_flow(error):
                raise
            try:
                search = Isolation(kept, inputs, kwargs, self._lower, repros, self._repros)
                return search.compiled(error, late=late)
            except NotIsolated as reason:
                log.warning("the graph cannot be cut around what Inductor cannot lower: %s", reason)
                return self._for_sizes(kept, inputs, kwargs, error)

    def _for_sizes(
        self, gm: fx.GraphModule, inputs: Sequence[Any], kwargs: dict[str, Any], error: Exception
    ) -> Callable[[list[Any]], Any]:
        """Compile a graph with symbolic sizes on which Inductor fails, for the sizes of each call."""
        kwargs = {**kwargs, "cudagraphs": _torch.BoxedBool(False)}

        def compile(given: Sequence[Any]) -> Callable[[list[Any]], Any]:
            with compiling(), _torch.outside_tracing():
                fixed, fakes = fixed_graph(gm, given)
                with self._patched(), _torch.compile_context(fakes):
                    return self._lower(fixed, fakes, kwargs, lambda: None)

        hinted = inputs_from_hints(inputs) if _torch.shape_env_of(inputs) is not None else None
        if hinted is None:
            raise error from None
        try:
            compiled = FixedSizes(gm, compile, hinted)
        except Exception:  # noqa: BLE001  (the first error is the one to show)
            raise error from None
        counters.count("fixed_sizes")
        log.warning("it is compiled for the sizes of each call instead (on_failure='isolate'): %s", error)
        return compiled

    def _lower(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        kwargs: Mapping[str, Any],
        generated: Callable[[], None],
    ) -> Any:
        """Lower a graph with Inductor; ``generated`` is called when there is code, not compiled yet."""

        def rewrite(code: str) -> str:
            generated()
            return use_shared_units(code)

        patches = dict(self.patches)
        if scatters_into_new_memory(gm):
            patches.setdefault("reorder_for_peak_memory", False)
        mark_fresh_outputs(gm.graph)
        users = patches.get(_POST_PASS, getattr(_torch.inductor_config, _POST_PASS))
        patches[_POST_PASS] = (*_torch.get_custom_graph_passes(users), _KeepOutputsFresh())
        shared = _torch_inductor.rewritten_code(rewrite)
        with (
            _torch.inductor_config.patch(patches),
            limited_lowerings(),
            shared,
            _torch_inductor.one_instruction_set(),
        ):
            calls = {
                node: run for node in gm.graph.nodes if (run := self._compiled_callable(node)) is not None
            }
            called = list(calls.values())
            _keep_strides(gm, calls)
            parts = _parts.get()
            names = {} if parts is None else {node.name: name_in_whole(node) for node in gm.graph.nodes}
            hits = _torch.dynamo_counters["inductor"]["fxgraph_cache_hit"]
            compiled = _torch.compile_fx_inner(gm, inputs, **self._wrapper_arguments, **kwargs)
            if parts is not None:
                from_cache = _torch.dynamo_counters["inductor"]["fxgraph_cache_hit"] > hits
                parts.append(LoweredPart(compiled, names, from_cache))
            if called:
                # Its code finds them by name, so they must live as long as it does. A cache hit would not
                # ensure that.
                compiled.called = called  # type: ignore[attr-defined]
                return unsaved(compiled, "it calls regions of this process by name")
            return compiled

    def _compile_segments(
        self, found: Cut, inputs: Sequence[Any], kwargs: dict[str, Any]
    ) -> Callable[[list[Any]], Any]:
        """Compile a graph around already compiled calls. Inductor gets only the segments between them."""
        placeholders = found.gm.graph.find_nodes(op="placeholder")
        values = dict(zip(placeholders, inputs, strict=True))
        static = {placeholders[i] for i in kwargs.get("static_input_idxs") or ()}
        compiled = []
        # With isolation, each segment is searched for calls that fail, so none may wait for the others.
        with one_unit() if self._repro_directory is None else contextlib.nullcontext():
            for segment in found.segments:
                given = [values[node] if node in values else node.meta["val"] for node in segment.inputs]
                static_indices = [i for i, node in enumerate(segment.inputs) if node in static]
                with _torch.segment_context() as strides:
                    module = segment_module(found.gm, segment)
                    compiled.append(
                        self._inner_compile(module, given, **{**kwargs, "static_input_idxs": static_indices})
                    )
                for node, known in zip(segment.outputs, strides, strict=False):
                    values[node] = with_strides(node.meta["val"], known)
        return stitch_segments(found, compiled, changed_strides(found, values))

    def _patched(self) -> Any:
        return _torch.inductor_config.patch(self.patches)

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        # Whoever compiles the backward graph later keeps this object, which must not keep the first call's
        # tensors.
        example_inputs, self._example_inputs = self._example_inputs, ()
        with self._patched(), _torch.compile_context(example_inputs):
            yield

    def aot_arguments(self) -> dict[str, Any]:
        return {"decompositions": decompositions(), **_torch.aot_extra_arguments(self._config_extra)}

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, **aot: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Run Inductor's passes on the joint graph (attention patterns and the like), then our partition."""
        with self._patched():
            return _torch.inductor_partition_fn(joint, joint_inputs, **aot)

    def partition_keeps_rng(self, joint: fx.GraphModule) -> bool:
        """False with random operators: Inductor's joint passes replace torch's generator by its own."""
        return not any(is_random(node) for node in joint.graph.nodes)

    def forward(
        self, gm: fx.GraphModule, inputs: Sequence[Any], *, inference: bool, visible: int | None = None
    ) -> Callable[..., Any]:
        """Compile with Inductor, freezing parameters if asked to. Args: as for :meth:`Compiler.forward`."""
        with self._patched():
            if inference and _torch.freezes_parameters():
                return _torch.compile_frozen(
                    gm, inputs, self._dynamo_graph, self._num_inputs, self._inner_compile, self._config_extra
                )
            return _torch.compile_fx_forward(
                gm,
                inputs,
                num_orig_model_outputs=self._num_outputs if visible is None else visible,
                num_example_inputs=self._num_inputs,
                compiler_config_extra=self._config_extra,
                inner_compile=self._inner_compile,
                is_inference=inference,
            )

    def backward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with self._patched():
            return _torch.compile_fx_backward(
                gm, inputs, compiler_config_extra=self._config_extra, inner_compile=self._inner_compile
            )


def _keep_strides(gm: fx.GraphModule, calls: Collection[fx.Node]) -> None:
    """Make Inductor preserve the traced strides of what calls of compiled code read and return.

    Inductor returns values that only the backward pass sees in the layout that its own convolutions prefer.
    That is a copy, and one that the code behind the backward call was not compiled for. With symbolic sizes,
    all outputs keep their strides: Inductor reports other strides as integers only, and segments of the
    backward graph cannot be compiled for these.
    """
    (output,) = gm.graph.find_nodes(op="output")
    visible = output.meta.get("user_visible_output_idxs")
    if not calls or visible is None:
        return
    of_calls = {node for call in calls for node in (*call.all_input_nodes, *call.users)}
    dynamic = any(isinstance(n.meta["val"], torch.SymInt) for n in gm.graph.find_nodes(op="placeholder"))
    kept = {
        i
        for i, node in enumerate(output.args[0])  # type: ignore[arg-type]
        if isinstance(node, fx.Node) and (dynamic or node in of_calls)
    }
    output.meta["user_visible_output_idxs"] = sorted({*visible, *kept})


class EagerCompiler:
    """Runs the partitioned graphs operator by operator: every stage except Inductor.

    Args:
        options: only the partition options and ``report`` are used.
        decompose: whether AOTAutograd decomposes operators as it does for Inductor.
        compiled_callable: returns the callable of an already compiled call, and ``None`` for other calls.
    """

    def __init__(
        self, options: Options, decompose: bool = False, compiled_callable: FindCallable = lambda node: None
    ) -> None:
        self._partition = partitioner_of(options, None)
        self._decompose = decompose
        self._compiled_callable = compiled_callable

    def settings(self) -> Any:
        return contextlib.nullcontext()

    def aot_arguments(self) -> dict[str, Any]:
        return {"decompositions": decompositions()} if self._decompose else {}

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, **aot: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return self._partition(joint, joint_inputs, **aot)

    def partition_keeps_rng(self, joint: fx.GraphModule) -> bool:
        return True

    def forward(
        self, gm: fx.GraphModule, inputs: Sequence[Any], *, inference: bool, visible: int | None = None
    ) -> Callable[..., Any]:
        """Run the graph operator by operator. Args: those of :meth:`Compiler.forward`."""
        return self._boxed(gm)

    def backward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return self._boxed(gm)

    def _boxed(self, gm: fx.GraphModule) -> Callable[..., Any]:
        if _torch_inductor.saves_compiled_code():
            return EagerCode(gm)
        compiled = _torch.make_boxed_func(gm.forward)
        called = [run for node in gm.graph.nodes if (run := self._compiled_callable(node)) is not None]
        compiled.called = called  # type: ignore[attr-defined]
        return compiled


class UnpartitionedCompiler(EagerCompiler):
    """Runs the graphs as AOTAutograd captured them, with torch's default partition: no stage of ours."""

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, **aot: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        aot.pop("decides", None)
        return default_partition(joint, joint_inputs, **aot)


_SCATTERS = {
    aten.index_put.default,
    aten._unsafe_index_put.default,
    aten._unsafe_masked_index_put_accumulate.default,
    aten.index_add.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
}


def scatters_into_new_memory(gm: fx.GraphModule) -> bool:
    """Whether the graph scatters into a value that it has just created, such as zeros.

    Inductor (seen in torch 2.13) writes into such memory in place. If it then fuses the call that fills the
    memory with the call that reads the result, and orders the kernels for peak memory, the reader can run
    before the scatter: gradients through ``interpolate`` and a convolution came out wrong. Without that
    ordering they are right.
    """
    return any(
        node.target in _SCATTERS and isinstance(node.args[0], fx.Node) and node.args[0].op == "call_function"
        for node in gm.graph.nodes
    )


def cache_identity(options: Options) -> str | None:
    """Hash of everything of ours that affects a compilation, or ``None`` if graphs must not be cached."""
    if options.check == "values":
        return None  # a cached graph ran through no pass that could be checked
    identities = [(item.name, item.identity()) for item in options.passes]
    if any(identity is None for _, identity in identities):
        return None
    text = repr(
        (
            identities,
            options.memory_budget,
            options.partition,
            sorted(options.inductor_patches().items(), key=str),
        )
    )
    return hashlib.sha256((torch.__version__ + own_source() + text).encode()).hexdigest()
