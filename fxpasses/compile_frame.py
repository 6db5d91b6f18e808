"""Compile one Dynamo graph: what the backend does when Dynamo calls it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, distributed, fx

from fxpasses import _torch
from fxpasses.checking.region_check import RegionChecks
from fxpasses.checking.stages.lowered import LoweringCheck
from fxpasses.checking.stages.staged import in_eager_with_repro
from fxpasses.checking.watch import ValueCheck
from fxpasses.compiling.backward_capture import with_captured_backward
from fxpasses.compiling.factors import CAPTURED_BACKWARD, input_names
from fxpasses.compiling.history import Compilation, describe_compilation, explain_miss, recent
from fxpasses.compiling.observing import Observer, RankCheck, recorder
from fxpasses.compiling.options import Options
from fxpasses.errors import ContractError, OptionsError
from fxpasses.pass_manager.limits import Limits, in_force
from fxpasses.pass_manager.manager import PassManager
from fxpasses.pass_manager.pass_base import GRAPH_KINDS
from fxpasses.passes import TUNED_PASSES, TunedPasses
from fxpasses.pipeline.compile_graph import compile_graph, unpartitioned_compiler
from fxpasses.pipeline.stages import Participants
from fxpasses.reports.files import GraphFiles

__all__ = ["compile_frame"]

log = logging.getLogger(__name__)


def compile_frame(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph.

    Args:
        gm: Dynamo's graph.
        example_inputs: its inputs, as fake tensors, real tensors and symbolic sizes.
        mode: the ``mode`` argument of ``torch.compile``.
        options: the ``options`` argument of ``torch.compile``: see :class:`fxpasses.Options`.

    Raises:
        OptionsError: if an option is wrong.
        ContractError: if the passes cannot be put into one pipeline.
        StageError: if a stage fails. Names the stage, pass, node and source line.
    """
    try:
        parsed = Options.parse(options, mode)
        given = (options or {}).get("passes")
        tuned = given == TUNED_PASSES or isinstance(given, TunedPasses)
        if tuned and parsed.compiled_autograd:
            problem = (
                "passes='tuned' cannot be measured together with compiled_autograd: leave one of them out"
            )
            raise OptionsError("passes", TUNED_PASSES, problem=problem)
        PassManager(parsed.passes)
    except (OptionsError, ContractError) as error:
        raise _torch.unwrapped(error, inspect.currentframe()) from None
    limits = in_force()
    if limits is not None:
        parsed = limited_options(parsed, limits)
        if limits.stage == "eager":
            return _torch.without_function_modes()(gm.forward)
        if limits.check and limits.stage in ("capture", "partition"):
            return in_eager_with_repro(gm, limits.stage, parsed.repro_directory(), _log_repro)
    if tuned and limits is None:
        from fxpasses.tuning.tuned_graph import (
            Session,
            tuned_graph,
        )  # imports measuring and checking, which other compilations do not need

        session = given if isinstance(given, Session) else None
        return tuned_graph(gm, example_inputs, parsed, session, functools.partial(_compile, limits=None))
    compiled = _compile(gm, example_inputs, parsed, limits)
    if parsed.compiled_autograd:
        # A captured backward pass already calls each region's backward operator.
        settings = {**(options or {}), "compiled_autograd": False, "regions": "off"}

        def backward(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            gm.meta[CAPTURED_BACKWARD] = True
            return compile_frame(gm, example_inputs, mode=mode, options=settings)

        return with_captured_backward(compiled, backward, example_inputs)
    return compiled


def _compile(
    gm: fx.GraphModule, example_inputs: Sequence[Any], parsed: Options, limits: Limits | None
) -> Callable[..., Any]:
    """Compile one Dynamo graph with settled options, together with its checks, reports and recording."""
    made = describe_compilation(gm, example_inputs, parsed)
    traced = gm.graph
    cached = _CacheObserver()
    observers: list[Observer] = [cached]
    if parsed.report:
        observers.append(GraphFiles(parsed.report))
    if parsed.check == "values":
        observers.append(RegionChecks())
    compile_id = _torch.CompileContext.current_compile_id()
    frame = compile_id.frame_id if compile_id is not None else None
    again = compile_id is not None and compile_id.frame_compile_id
    earlier = recent.of_frame(frame) if again and parsed.report else None
    for observer in observers:
        observer.dynamo(gm, parsed, explain_miss(earlier, made) if earlier is not None else None)
    recording = recorder()
    lifted = list[Tensor]()
    if recording is not None:
        observers.append(recording.observer())
        named = (*gm.named_parameters(remove_duplicate=False), *gm.named_buffers(remove_duplicate=False))
        lifted = [tensor for _, tensor in named]  # in AOTAutograd's order of lifted inputs
    lowered = None
    if limits is not None and limits.check and limits.stage == "inductor":
        lowered = LoweringCheck(parsed.repro_directory(), limits.suspect)
    ranks = _rank_check(parsed, made, gm, example_inputs)
    participants = Participants(
        unpartitioned_compiler if limits is not None and limits.stage == "capture" else None,
        observers,
        values=ValueCheck(parsed.repro_directory()) if parsed.check == "values" else None,
        lowered=lowered,
        ranks=ranks,
        decides=ranks.saved if ranks is not None and parsed.ranks == "agree" else None,
        advises=True,
    )
    log.info("compiling a graph of %d nodes", len(gm.graph.nodes))
    compiled = compile_graph(gm, example_inputs, parsed, participants)
    if recording is not None:
        compiled = recording.watched(compiled, lifted, traced)
    recent.add(dataclasses.replace(made, from_cache=cached.found), frame)
    shape_env = _torch.shape_env_of(example_inputs)
    if shape_env is not None:
        for observer in observers:
            observer.guards(shape_env, traced)
    return compiled


class _CacheObserver(Observer):
    found = False

    def taken_from_cache(self) -> None:
        self.found = True


def _log_repro(file: str, calls: int, why: str) -> None:
    if not file:
        log.warning("there is no repro file: %s", why)


def _rank_check(
    parsed: Options, made: Compilation, gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> RankCheck | None:
    if parsed.ranks == "off" or not distributed.is_available() or not distributed.is_initialized():
        return None
    if distributed.get_world_size() < 2:
        return None
    from fxpasses.distributed import Agreement  # costs half a second, which a single process need not pay

    compile_id = _torch.CompileContext.current_compile_id()
    frame = "a graph" if compile_id is None else f"frame {compile_id.frame_id}"
    names = zip(input_names(gm), example_inputs, strict=True)
    return Agreement(made, [name if isinstance(value, Tensor) else "" for name, value in names], frame)


def limited_options(options: Options, limits: Limits) -> Options:
    """The options for a compilation that stops at the stage given by ``limits``."""
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
