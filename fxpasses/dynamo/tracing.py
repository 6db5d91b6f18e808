"""Dynamo's tracing for this backend: on ``fake``'s dispatch cache, with calls of repeated modules copied."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import fx

import fake
from fxpasses.dynamo import _torch, _torch_reading
from fxpasses.dynamo.replay import Replay

__all__ = ["accelerated", "install", "uninstall"]

log = logging.getLogger(__name__)


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
                log.debug("tracing without acceleration: %s", unknown)
                wanted = False
        yield wanted


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
        log.debug("this version of torch compiles frames in another way: Dynamo traces without acceleration")


def uninstall() -> None:
    """Let Dynamo trace for this backend as for any other."""
    _torch.restore_compilations()


def _accelerates(options: Any) -> bool:
    """Whether the options, which are not checked yet, leave acceleration on."""
    return not isinstance(options, Mapping) or options.get("accelerate", True) is True
