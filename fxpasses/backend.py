"""The backend: ``torch.compile(model, backend="fxpasses", options={...})``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from fxpasses import _torch
from fxpasses.backward_capture import captures_backward
from fxpasses.inductor import EagerCompiler, InductorCompiler
from fxpasses.options import Options
from fxpasses.pipeline import Compiler, Observer, Pipeline
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
        StageError: when a stage fails; names stage, pass, node and source line.
    """
    parsed = Options.parse(options, mode)
    compiler: Compiler
    if parsed.compiler == "inductor":
        compiler = InductorCompiler(parsed, gm, example_inputs)
    else:
        compiler = EagerCompiler(parsed, decompose=True)
    observers: list[Observer] = [GraphFiles(parsed.report)] if parsed.report else []
    log.info("compiling a graph of %d nodes", len(gm.graph.nodes))
    compiled = Pipeline(parsed, compiler, observers).compile(gm, example_inputs)
    if parsed.compiled_autograd:
        settings = {**(options or {}), "compiled_autograd": False}

        def backward(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            return fxpasses(gm, example_inputs, mode=mode, options=settings)

        return captures_backward(compiled, backward, example_inputs)
    return compiled


# What torch._dynamo.reset() calls on a backend: recorded CUDA graphs hold memory that compiled code no longer needs.
fxpasses.reset = _torch.reset_cudagraph_trees  # type: ignore[attr-defined]
