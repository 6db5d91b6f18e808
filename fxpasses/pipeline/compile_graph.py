"""Compile one Dynamo graph, from the first line to the last.

::

    Dynamo graph ── floats settled ── regions: repeated layers, each compiled by the same function
        AOTAutograd ── joint graph ── joint passes ── partition ─┬─ forward graph ── passes ── compiler
                                                                 └─ backward graph ─ passes ── compiler
        AOTAutograd ── inference graph ── passes ── compiler                           (no gradients needed)

A whole graph, a region and a capture differ only in the compiler. For a whole graph it is Inductor, or the
graph itself runs. For a region it keeps what becomes the region's operators. For a capture it keeps the
graphs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fxpasses import _torch
from fxpasses.compiling import _torch_inductor
from fxpasses.compiling.graph_compilers import (
    Compiler,
    EagerCompiler,
    InductorCompiler,
    UnpartitionedCompiler,
)
from fxpasses.compiling.options import Options
from fxpasses.dynamo._torch_overlaps import guard_overlaps
from fxpasses.errors import StageError
from fxpasses.graphs.rewriting import remove_full_slices
from fxpasses.pipeline.stages import Participants, Stages
from fxpasses.regional import (
    CompiledRegion,
    KeptGraphs,
    RegionCompiler,
    RegionGraph,
    RegionRefused,
    changed_memory,
    compiled_callable,
    floats_of_one_graph,
    hold_regions,
    inline_gathers,
    settle_floats,
    with_regions,
)


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    participants: Participants | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo or of a region into a callable with the graph's calling convention.

    Args:
        gm: the graph.
        example_inputs: its inputs: fake tensors, real tensors and symbolic sizes.
        options: the options of the compilation.
        participants: who else sees the graphs, and who turns them into callables.

    Raises:
        StageError: with ``on_failure="raise"``. Names the stage, the pass, the node and the user's line.
    """
    participants = participants or Participants()
    stages = Stages(options, participants)
    dynamo_graph = gm
    with contextlib.nullcontext() if participants.of_region else floats_of_one_graph():
        overlap = False
        if not participants.of_region:
            # This guard cannot be handed to another process.
            if not _torch_inductor.saves_compiled_code():
                overlap = guard_overlaps(gm.graph, changed_memory(gm.graph.nodes))
            settle_floats(gm, as_constants=bool(options.inductor_patches().get("triton.cudagraphs")))
        gm, regions = with_regions(
            gm,
            options,
            participants.observers,
            participants.regions,
            lambda region_graph: _compile_region(region_graph, options, participants),
            trace_gathers=functools.partial(_trace_gathers, options=options),
            inside=participants.of_region,
        )
        compiler = (participants.compiler or new_compiler)(options, gm, example_inputs)

        def partition_joint(joint: fx.GraphModule, joint_inputs: Any, **aot: Any) -> Any:
            inline_gathers(joint)
            remove_full_slices(joint.graph)
            stages.traced(joint, aot["num_fwd_outputs"])
            stages.run_passes(joint, "joint")
            return stages.partition(joint, compiler, joint_inputs, **aot)

        def compile_forward(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            return stages.lower(gm, "forward", lambda: compiler.forward(gm, inputs, inference=False))

        def compile_backward(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            # May run as late as the first backward pass.
            with _torch.data_dependent_sizes(inputs):
                return stages.lower_backward(gm, inputs, lambda: compiler.backward(gm, inputs))

        def compile_inference(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            inline_gathers(gm)
            remove_full_slices(gm.graph)
            return stages.lower(gm, "inference", lambda: compiler.forward(gm, inputs, inference=True))

        def trace() -> Callable[..., Any]:
            with (
                stages.tracing(gm, cached=not overlap),
                compiler.settings(),
                _torch.data_dependent_sizes(example_inputs),
                _torch.gradients_of_results(),
            ):
                return _torch.aot_autograd(
                    partition_fn=partition_joint,
                    fw_compiler=_torch.serializable(compile_forward),
                    bw_compiler=_torch.serializable(compile_backward),
                    inference_compiler=_torch.serializable(compile_inference),
                    keep_inference_input_mutations=True,
                    **compiler.aot_arguments(),
                )(gm, example_inputs)

        # Graphs that call regions or are cut into segments are stitched during lowering: see the compiler.
        compiled = stages.run(trace, gm, dynamo_graph)
    return hold_regions(compiled, regions)


def new_compiler(options: Options, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiler:
    """Create the compiler that the options name, for one graph.

    Args:
        options: the options of the compilation.
        gm: the graph, with its regions already replaced by calls.
        example_inputs: its inputs.
    """
    if options.compiler == "inductor":
        return InductorCompiler(options, gm, example_inputs, compiled_callable)
    return EagerCompiler(options, decompose=True, compiled_callable=compiled_callable)


def unpartitioned_compiler(options: Options, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiler:
    """Create a compiler that runs graphs as AOTAutograd captured them. Args: as for :func:`new_compiler`."""
    return UnpartitionedCompiler(options, decompose=True)


def _compile_region(region_graph: RegionGraph, options: Options, outer: Participants) -> CompiledRegion:
    """Compile the graph of a region like any other graph, and return what the region's operators call.

    Args:
        region_graph: the graph.
        options: the options of the enclosing graph's compilation.
        outer: those of the enclosing graph.

    Raises:
        RegionRefused: if AOTAutograd shows that it is not a function from tensors to fresh tensors.
        StageError: if a stage fails.
    """
    start = time.perf_counter()
    observers = [observer.of_region(region_graph.gm) for observer in outer.observers]
    check = next((c for c in (observer.region_check(options) for observer in observers) if c), None)
    own = dataclasses.replace(
        options.of_region(region_graph.gm),
        # A CUDA graph captures the enclosing graph.
        inductor={**options.inductor_patches(), "triton.cudagraphs": False},
        mode=None,
        # Inside of a region, the cost model alone decides.
        regions="auto" if isinstance(options.regions, tuple) else options.regions,
    )
    compilers: list[RegionCompiler] = []

    def compiler(options: Options, gm: fx.GraphModule, inputs: Sequence[Any]) -> Compiler:
        """Return the compiler of a region. Args: options, the graph and its inputs."""
        compilers.append(RegionCompiler(new_compiler(options, gm, inputs), region_graph, options, check))
        return compilers[-1]

    participants = Participants(
        compiler, observers, check, decides=outer.decides, of_region=True, counts=False, regions=outer.regions
    )
    try:
        compiled = compile_graph(region_graph.gm, region_graph.example_inputs, own, participants)
    except StageError as error:
        refused = _find_refusal(error)
        if refused is not None:
            raise refused from error
        raise
    return compilers[0].register(getattr(compiled, "fxpasses_regions", []), time.perf_counter() - start)


def _trace_gathers(region_graph: RegionGraph, options: Options) -> CompiledRegion:
    """Trace the code that gathers a layer's parameters, as a region whose graphs are inlined at its calls.

    Args:
        region_graph: the graph.
        options: the options of the enclosing graph's compilation.

    Raises:
        RegionRefused: if its graphs cannot be inlined.
        StageError: if it cannot be traced.
    """
    own = dataclasses.replace(options, passes=(), compiler="eager", regions="off", on_failure="raise")
    kept = KeptGraphs(own, decompose=True)
    region_compiler = RegionCompiler(kept, region_graph, own, None)
    compile_graph(
        region_graph.gm,
        region_graph.example_inputs,
        own,
        Participants(lambda *_: region_compiler, of_region=True, counts=False),
    )
    region = region_compiler.register([], 0.0)
    if region.symbols or any(node.op == "get_attr" for graph in kept.graphs.values() for node in graph.nodes):
        raise RegionRefused("it takes more than parameters")
    region.inlined = kept.graphs
    return region


def _find_refusal(error: BaseException | None) -> RegionRefused | None:
    while error is not None and not isinstance(error, RegionRefused):
        error = error.__cause__ or error.__context__
    return error
