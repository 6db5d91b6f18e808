"""The backend: ``torch.compile(model, backend="fxpasses", options={...})``.

This module is imported whenever a model is compiled, even if an earlier process left a plan for it. Inductor,
the passes and their checks are imported with the first graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fake.seam.patches import LEDGER
from fxpasses import dynamo
from fxpasses.dynamo._torch_ddp import cut_buckets, small_buckets
from fxpasses.dynamo._torch_registry import forget_cudagraphs, repeatable_registration
from fxpasses.plans import entry
from fxpasses.ranks.here import HERE

__all__ = ["PATCHES", "fxpasses"]  # noqa: F822 - provided by __getattr__


def _fxpasses(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph. Dynamo finds this as ``"fxpasses"``. Args: those of :func:`compile_frame`."""
    from fxpasses.compile_frame import compile_frame  # which imports Inductor

    return compile_frame(gm, example_inputs, mode=mode, options=options)


def _planned_buckets(gm: fx.GraphModule, keywords: Mapping[str, Any]) -> Any:
    from fxpasses.regional import planned_buckets

    return planned_buckets(gm, keywords)


def _reset() -> None:
    """The hook that ``torch._dynamo.reset()`` calls on a backend."""
    forget_cudagraphs()
    HERE.forget()


_fxpasses.__name__ = _fxpasses.__qualname__ = "fxpasses"
_fxpasses.reset = _reset  # type: ignore[attr-defined]

PATCHES = LEDGER.add(
    dynamo.around_compilations(_fxpasses),
    entry.before_tracing(_fxpasses),
    cut_buckets(_fxpasses, _planned_buckets),
    small_buckets(_fxpasses),
    *repeatable_registration("fxpasses", _fxpasses),
)
"""The patches that torch needs before it calls the backend for the first time."""


def __getattr__(name: str) -> Any:
    """Provide ``fxpasses.backend.fxpasses``, which ``torch.compile`` looks up right before it compiles."""
    if name != "fxpasses":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    LEDGER.keep(*PATCHES)
    if not LEDGER.is_in_force(PATCHES[0]):
        from fxpasses import compile_frame  # noqa: F401 - its missing torch names are in the warning, too

        dynamo.warn_of_torch(torch.__version__)
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        from fxpasses.distributed.answering import Answering

        Answering.introduce()
    return _fxpasses
