"""The backend: ``torch.compile(model, backend="fxpasses", options={...})``."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import fx

from fxpasses import _torch, dynamo
from fxpasses.checking.lowered import LoweringCheck
from fxpasses.checking.region_check import RegionChecks
from fxpasses.checking.staged import in_eager_with_repro
from fxpasses.checking.watch import ValueCheck
from fxpasses.compiling.backward_capture import with_captured_backward
from fxpasses.compiling.history import describe_compilation, recent
from fxpasses.compiling.inductor import EagerCompiler, InductorCompiler, UnpartitionedCompiler
from fxpasses.compiling.observing import Observer
from fxpasses.compiling.options import Options
from fxpasses.compiling.pipeline import Compiler, Pipeline
from fxpasses.errors import ContractError, OptionsError
from fxpasses.pass_manager.contract import GRAPH_KINDS
from fxpasses.pass_manager.limits import Limits, in_force
from fxpasses.pass_manager.manager import PassManager
from fxpasses.regional import compiled_callable, floats_of_one_graph, hold_regions, with_regions
from fxpasses.report import GraphFiles

__all__ = ["fxpasses"]

log = logging.getLogger(__name__)


def fxpasses(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph. Dynamo calls this; it finds it by the name ``"fxpasses"``.

    Args:
        gm: Dynamo's graph.
        example_inputs: its inputs, as fake tensors, real tensors and symbolic sizes.
        mode: what ``torch.compile`` was given as ``mode``.
        options: what it was given as ``options``: see :class:`fxpasses.Options`.

    Raises:
        OptionsError: for a wrong option.
        ContractError: for passes that cannot be put into one pipeline.
        StageError: when a stage fails; names stage, pass, node and source line.
    """
    try:
        parsed = Options.parse(options, mode)
        PassManager(parsed.passes)
    except (OptionsError, ContractError) as error:
        raise _torch.unwrapped(error, inspect.currentframe()) from None
    limits = in_force()
    if limits is not None:
        parsed = limited_options(parsed, limits)
        if limits.stage == "eager":
            return gm.forward
        if limits.check and limits.stage in ("capture", "partition"):
            return in_eager_with_repro(gm, limits.stage, parsed.repro_directory(), _log_repro)
    made = describe_compilation(gm, example_inputs, parsed)
    traced = gm.graph
    observers: list[Observer] = [GraphFiles(parsed.report)] if parsed.report else []
    if parsed.check == "values":
        observers.append(RegionChecks())
    original = gm
    with floats_of_one_graph():
        gm, regions = with_regions(gm, parsed, observers)
        pipeline = _pipeline(parsed, gm, example_inputs, limits, observers)
        compiled = hold_regions(pipeline.compile(gm, example_inputs, original), regions)
    recent.add(dataclasses.replace(made, from_cache=pipeline.from_cache))
    shape_env = _torch.shape_env_of(example_inputs)
    if shape_env is not None:
        for observer in observers:
            observer.guards(shape_env, traced)
    if parsed.compiled_autograd:
        # A captured backward pass calls each region's backward operator already.
        settings = {**(options or {}), "compiled_autograd": False, "regions": "off"}

        def backward(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            return fxpasses(gm, example_inputs, mode=mode, options=settings)

        return with_captured_backward(compiled, backward, example_inputs)
    return compiled


def _log_repro(file: str, calls: int, why: str) -> None:
    if not file:
        log.warning("there is no repro file: %s", why)


def _pipeline(
    parsed: Options,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    limits: Limits | None,
    observers: Sequence[Observer],
) -> Pipeline:
    compiler: Compiler
    if limits is not None and limits.stage == "capture":
        compiler = UnpartitionedCompiler(parsed, decompose=True)
    elif parsed.compiler == "inductor":
        compiler = InductorCompiler(parsed, gm, example_inputs)
        compiler.compiled_callable = compiled_callable
    else:
        compiler = EagerCompiler(parsed, decompose=True)
        compiler.compiled_callable = compiled_callable
    log.info("compiling a graph of %d nodes", len(gm.graph.nodes))
    lowered = None
    if limits is not None and limits.check and limits.stage == "inductor":
        lowered = LoweringCheck(parsed.repro_directory(), limits.suspect)
    values = ValueCheck(parsed.repro_directory()) if parsed.check == "values" else None
    return Pipeline(parsed, compiler, observers, values, lowered=lowered, advises=True)


def limited_options(options: Options, limits: Limits) -> Options:
    """The options of a compilation that ends where ``limits`` say."""
    manager = PassManager(options.passes)
    passes = limits.allowed_passes(
        list(dict.fromkeys(p for kind in GRAPH_KINDS for p in manager.order(kind)))
    )
    return dataclasses.replace(
        options,
        passes=passes,
        compiler=options.compiler if limits.stage == "inductor" else "eager",
        regions=options.regions if limits.stage == "inductor" and not limits.check else "off",
        check="values" if limits.check and limits.stage != "inductor" else options.check,
        report=str(Path(limits.record).parent) if limits.check and limits.record else options.report,
        on_failure="raise",
    )


# What torch._dynamo.reset() calls on a backend: recorded CUDA graphs hold memory that compiled code no longer needs.
fxpasses.reset = _torch.reset_cudagraph_trees  # type: ignore[attr-defined]

dynamo.install(fxpasses)
_torch.allow_repeated_registration("fxpasses", fxpasses)
