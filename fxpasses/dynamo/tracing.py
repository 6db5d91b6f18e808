"""Dynamo's tracing for this backend: on ``fake``'s dispatch cache, with calls of repeated modules copied."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx

import fake
from fake.seam.missing import missing_names
from fxpasses.dynamo import _torch, _torch_reading
from fxpasses.dynamo.replay import Replay
from fxpasses.errors import UnknownTorchWarning

__all__ = ["accelerated", "install", "uninstall", "warn_of_torch"]


@contextmanager
def accelerated(wanted: bool, captured: fx.GraphModule | None = None) -> Iterator[bool]:
    """Tracing on ``fake``'s engine, if that is wanted and it knows this version of torch; gives whether it is on.

    Args:
        captured: the Dynamo graph that AOTAutograd is about to trace, if it is.
    """
    with ExitStack() as stack:
        if wanted:
            try:
                stack.enter_context(fake.accelerate())
                if captured is not None:
                    stack.enter_context(_torch.without_function_metadata(captured))
            except fake.UnsupportedTorchVersionError as unknown:
                warn_of_torch(unknown.found)
                wanted = False
        yield wanted


@functools.cache
def warn_of_torch(found: str) -> None:
    """Say once what an unknown release of torch means."""
    gone = missing_names()
    without = f" It has no {', '.join(gone)}: what needs that raises MissingTorchNameError." if gone else ""
    warnings.warn(
        f"torch {found} is not a release that fxpasses knows: it traces without fake.accelerate(), copies of repeated modules and "
        "lean symbols. Graphs and results are the same; tracing takes about half as long again, and longer in models of many equal "
        "layers. `python -m fxpasses doctor` says what is off and what to do." + without,
        UnknownTorchWarning,
        stacklevel=2,
    )


def install(backend: Callable[..., Any]) -> None:
    """From now on, what Dynamo compiles for ``backend`` is traced with acceleration and :class:`.Replay`, unless its options
    say no.

    Process-wide, and without effect on other backends; :func:`uninstall` undoes it.
    """

    @contextmanager
    def around(compiling: Any, keywords: Mapping[str, Any]) -> Iterator[None]:
        wanted = compiling is backend and _accelerates(keywords.get("options"))
        with accelerated(wanted) as on, ExitStack() as stack:
            if on:
                stack.enter_context(_torch_reading.quick_settings())
                stack.enter_context(Replay().watching())
            yield

    if not _torch.surround_compilations(around):
        warn_of_torch(torch.__version__)


def uninstall() -> None:
    """Let Dynamo trace for this backend as for any other."""
    _torch.restore_compilations()


def _accelerates(options: Any) -> bool:
    """Whether the options, which are not checked yet, leave acceleration on."""
    return not isinstance(options, Mapping) or options.get("accelerate", True) is True
