"""Compile a region's graphs into functions from plain tensors to fresh tensors, called through operators."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fake.dispatch.communication import communicates
from fxpasses.compiling.graph_compilers import Compiler, cache_identity
from fxpasses.compiling.observing import RegionCheck
from fxpasses.compiling.options import Options
from fxpasses.compiling.shared_kernels import one_unit
from fxpasses.graphs.aliasing import uses_rng
from fxpasses.graphs.fresh_outputs import keep_outputs_fresh
from fxpasses.graphs.rewriting import copy_graph, outputs_of
from fxpasses.partitioner.cost import CostModel
from fxpasses.regional import _torch
from fxpasses.regional.aliases import return_only, separate_aliases, spec_of
from fxpasses.regional.compiled_region import CompiledRegion, Source, table
from fxpasses.regional.errors import RegionRefused
from fxpasses.regional.region_graph import RegionGraph
from fxpasses.regional.region_operators import communicating_graph, region_work
from fxpasses.regional.shared import recompute_from_shared


@dataclass(eq=False)
class RegionCompiler:
    """Compiles a region's graphs so that their outputs share no memory.

    AOTAutograd never calls the returned callables: the region's operators call the compiled graphs
    themselves.

    Args: the compiler of the graphs, the region, the options of its compilation, and the check that compares
    its graphs before and after each rewrite.
    """

    _compiler: Compiler
    _region_graph: RegionGraph
    _options: Options
    _values: RegionCheck | None
    _num_outputs: int = 0
    _region: CompiledRegion | None = None
    _strides: list[Any] = field(default_factory=list)
    _text: str = ""

    def register(self, inner: Sequence[CompiledRegion], seconds: float) -> CompiledRegion:
        """Add the region to the table in which the operators look it up.

        Args:
            inner: the regions that it calls.
            seconds: how long its compilation took.

        Returns:
            The compiled region, or one of equal content that is already in the table.
        """
        region = self._compiled()
        region.grad_placements = [wrap.grad_placements if wrap else None for wrap in self._region_graph.wraps]
        identity = str(cache_identity(self._options)) + repr(region_metadata(region))
        text = self._region_graph.text + self._text + identity
        region.key = hashlib.sha256(text.encode()).hexdigest()[:32]
        region.seconds = seconds
        region = table.add(region)
        region.inner += inner
        return region

    def _compiled(self) -> CompiledRegion:
        if self._region is None:
            raise RegionRefused("AOTAutograd compiled nothing")
        return self._region

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        # Each graph is searched for what cannot be compiled, so none may wait for the others.
        unit = contextlib.nullcontext() if self._options.on_failure == "isolate" else one_unit()
        fake_mode = _torch.detect_fake_mode(self._region_graph.inputs)
        with unit, _torch.region_tracing_context(fake_mode), self._compiler.settings():
            yield

    def aot_arguments(self) -> dict[str, Any]:
        return self._compiler.aot_arguments()

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, **aot: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self._num_outputs = aot["num_fwd_outputs"]
        recompute_from_shared(
            joint, [*(False for _ in self._region_graph.symbols), *self._region_graph.shared]
        )
        return self._compiler.partition(joint, joint_inputs, **aot)

    def partition_keeps_rng(self, joint: fx.GraphModule) -> bool:
        return self._compiler.partition_keeps_rng(joint)

    def forward(
        self, gm: fx.GraphModule, inputs: Sequence[Any], *, inference: bool, visible: int | None = None
    ) -> Callable[..., Any]:
        """Compile the graph and record what callers need. Args: those of :meth:`Compiler.forward`."""
        metadata = _torch.forward_metadata()
        if reason := _torch.unsupported_metadata(metadata):
            raise RegionRefused(reason)
        keep_outputs_fresh(gm.graph)  # the surrounding graph is told what shares memory here
        outputs = outputs_of(gm.graph)
        count = len(outputs) if inference else self._num_outputs
        kept = outputs[count:]
        tensors = [n for n in kept if isinstance(n.meta["val"], torch.Tensor)]
        sizes = [n for n in kept if not isinstance(n.meta["val"], torch.Tensor)]
        if any(not isinstance(n.meta["val"], (int, torch.SymInt)) for n in sizes):
            raise RegionRefused("its backward pass needs an opaque object")
        known = set(self._region_graph.symbols)
        if any(
            not _torch.free_symbols(n.meta["val"]) <= known
            for n in [*outputs[:count], *kept]
            if n is not None
        ):
            # For example the RNG state that a checkpoint keeps.
            raise RegionRefused("one of its values has a size that its inputs do not give")
        returned, sources = separate_aliases(gm, [*outputs[:count], *tensors])
        if any(source is None for source in sources[:count]):
            raise RegionRefused("it returns something else than tensors")
        visible = 1 + max((s.index for s in sources if s and _keeps_strides(s, sources[:count])), default=-1)
        if self._region_graph.symbols:
            visible = len(returned)  # Inductor reports other strides as numbers only
        return_only(gm, returned)
        random = any(_is_random(node) for node in gm.graph.nodes)
        self._text += gm.graph.python_code("self").src
        communicating = self._communicating(gm)
        work = _call_costs(gm)
        exact = {"forward": self._values.exact_run(gm)} if self._values is not None else {}
        with _torch.output_strides() as strides:
            compiled = self._compiler.forward(gm, inputs, inference=inference, visible=visible)
        if self._values is not None:
            compiled = self._values.watch("inference" if inference else "forward", compiled, None)
        self._strides = _reported_strides(strides, returned, dynamic=bool(self._region_graph.symbols))
        self._region = CompiledRegion(
            symbols=list(self._region_graph.symbols),
            input_specs=[spec_of(value) for value in self._region_graph.inputs],
            forward=compiled,
            forward_specs=[spec_of(n.meta["val"], s) for n, s in zip(returned, self._strides, strict=True)],
            outputs=sources[:count],  # type: ignore[arg-type]
            differentiable=[False] * count if inference else _torch.outputs_with_gradient(metadata),
            random=random,
            saved=sources[count:],  # type: ignore[arg-type]
            saved_sizes=[_torch.expression(n.meta["val"]) for n in sizes],
            exact=exact,
            communicating={"forward": communicating} if communicating else {},
            work={"forward": work},
        )
        return _raise_if_called

    def backward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        region = self._compiled()
        placeholders = gm.graph.find_nodes(op="placeholder")
        values = [n.meta["val"] for n in placeholders]
        tensors = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
        saved = tensors[: len(region.saved)]
        tangents = tensors[len(region.saved) :]
        if len(values) - len(tensors) != len(region.saved_sizes) or len(tangents) != sum(
            region.differentiable
        ):
            raise RegionRefused("its backward graph takes other values than its forward graph saves")
        if any(isinstance(v, torch.Tensor) for v in values[: len(region.saved_sizes)]):
            raise RegionRefused("its backward graph does not take its sizes first")
        given = list(inputs)
        for i, source in zip(saved, region.saved, strict=True):
            given[i] = self._restride(given[i], source)
        region.tangents = [spec_of(values[i]) for i in tangents]
        returned, sources = separate_aliases(gm, outputs_of(gm.graph))
        return_only(gm, returned)
        self._text += gm.graph.python_code("self").src
        communicating = self._communicating(gm)
        if communicating is not None:
            region.communicating["backward"] = communicating
        region.work["backward"] = _call_costs(gm)
        if self._values is not None:
            region.exact["backward"] = self._values.exact_run(gm)
        with _torch.output_strides() as strides:
            region.backward = self._compiler.backward(gm, given)
        if self._values is not None:
            region.backward = self._values.watch_backward(region.backward, sources)
        known = _reported_strides(strides, returned, dynamic=bool(self._region_graph.symbols))
        region.backward_specs = [spec_of(n.meta["val"], s) for n, s in zip(returned, known, strict=True)]
        region.gradients = sources[len(self._region_graph.symbols) :]
        return _raise_if_called

    def _restride(self, value: torch.Tensor, source: Source) -> torch.Tensor:
        """Give a saved value the strides that it has in the compiled forward graph."""
        if source.is_input or source.steps or self._strides[source.index] is None:
            return value
        stride = tuple(self._strides[source.index])
        if all(type(s) is int for s in value.stride()) and tuple(value.stride()) != stride:
            return value.as_strided(value.shape, stride)
        return value

    def _communicating(self, gm: fx.GraphModule) -> fx.Graph | None:
        """Return a copy of a graph with collectives, its own or in called regions, for ranks to compare."""
        calls = [node for node in gm.graph.nodes if node.op == "call_function"]
        if not any(communicates(node.target) or communicating_graph(node) is not None for node in calls):
            return None
        if self._values is not None:
            raise RegionRefused(
                "its collectives are made up where values are checked, which takes a graph that shows them"
            )
        return copy_graph(gm).graph


def _call_costs(gm: fx.GraphModule) -> list[tuple[int, int]]:
    """Return FLOPs and bytes of each call, including those inside called regions."""
    costs, found = CostModel(), list[tuple[int, int]]()
    for node in gm.graph.nodes:
        inner, own = region_work(node), costs.flops_and_bytes(node)
        found += inner if inner is not None else [own] if own is not None else []
    return found


def region_metadata(region: CompiledRegion) -> Any:
    """Return everything that the surrounding graph relies on."""
    return (
        region.forward_specs, region.backward_specs, region.outputs, region.saved, region.gradients, region.tangents,
        region.differentiable, region.random, region.grad_placements,
    )  # fmt: skip


def _keeps_strides(source: Source, user: Sequence[Source | None]) -> bool:
    """Whether a result must keep its traced strides: the user sees it, or views are made of it."""
    if source.is_input:
        return False
    return bool(source.steps) or any(s is source for s in user)


def _reported_strides(strides: list[Any], returned: Sequence[fx.Node], *, dynamic: bool) -> list[Any]:
    """Return, per output, the strides that the compiler reports, or ``None`` to use the traced ones."""
    if dynamic or len(strides) != len(returned):
        return [None] * len(returned)
    return [None if s is None else tuple(int(x) for x in s) for s in strides]


def _is_random(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, _torch.OpOverload):
        return uses_rng(node) or "seed" in target._schema.name
    return "rng" in str(target)


def _raise_if_called(*_: Any) -> Any:
    raise AssertionError("the callable that AOTAutograd was given for a region is not the one that runs")
