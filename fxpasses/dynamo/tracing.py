"""Dynamo tracing for this backend: on ``fake``'s dispatch cache, with copied calls of repeated modules."""

from __future__ import annotations

import functools
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any

from torch import fx

import fake
from compiled_autograd.session.node_sessions import capture_later
from fake.seam.missing import missing_names
from fake.seam.patches import Patch
from fxpasses.counters import EAGER_FILE, Fallback, counters
from fxpasses.dynamo import _torch
from fxpasses.dynamo.replay import Replay
from fxpasses.errors import UnknownTorchWarning

log = logging.getLogger(__name__)


@contextmanager
def accelerated(wanted: bool, captured: fx.GraphModule | None = None) -> Iterator[bool]:
    """Trace with ``fake``'s engine if wanted and if it knows this torch version. Yields whether it is on.

    Args:
        captured: the Dynamo graph that AOTAutograd is about to trace, if any.
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
    """Warn once about the effects of an unknown torch release."""
    gone = missing_names()
    without = f" It has no {', '.join(gone)}: what needs that raises MissingTorchNameError." if gone else ""
    warnings.warn(
        f"torch {found} is not a release that fxpasses knows: it traces without fake.accelerate(), copies of repeated modules and "
        "lean symbols. Graphs and results are the same; tracing takes about half as long again, and longer in models of many equal "
        "layers. `python -m fxpasses doctor` says what is off and what to do." + without,
        UnknownTorchWarning,
        stacklevel=2,
    )


def around_compilations(backend: Callable[..., Any]) -> Patch:
    """The ledger's patch that traces compilations for ``backend`` with acceleration and :class:`.Replay`.

    Options can turn it off. It has no effect on other backends.
    """

    @contextmanager
    def around(
        code: CodeType | None, compiling: Any, keywords: Mapping[str, Any]
    ) -> Iterator[CodeType | None]:
        """Wrap a compilation; yields code to run instead, or None. Args: code, backend, its keywords."""
        ours, options = compiling is backend, keywords.get("options")
        if ours and code is not None:
            from fxpasses.compiling.observing import recorder  # imports Inductor, which is needed now

            recording = recorder()
            instead = None if recording is None else recording.instead_of(code)
            if instead is not None:
                yield instead
                return
        given = options if isinstance(options, Mapping) else {}  # not validated yet
        with accelerated(ours and given.get("accelerate", True) is True) as on, ExitStack() as stack:
            if ours and given.get("compiled_autograd") is True:
                stack.enter_context(capture_later())
            if on:
                stack.enter_context(Replay().watching())
            try:
                yield None
            except _torch.Unsupported as error:
                if ours and code is not None:
                    _count_eager(code, error, options)
                raise

    return _torch.wrap_frame_compilations(around)


def _count_eager(code: CodeType, error: Exception, options: Any) -> None:
    """Count a function that Dynamo leaves in eager (its callees may still be compiled), also in a report."""
    said, _, where = str(error).partition("\nfrom user code")
    found = [line for line in said.splitlines() if line and not line.startswith((" ", "*", "For more"))]
    reason = ", because of: ".join(reversed(found))
    lines = where.splitlines()
    own = [i + 1 for i, line in enumerate(lines[:-1]) if line.endswith(f", in {code.co_name}")]
    if own:  # not in its callees, such as torch's function wrappers
        reason += f" (at {lines[own[-1]].strip()})"
    if "_fully_shard" in where:
        reason += "; fxpasses.distributed.shard(model) puts what the hooks of fully_shard do into the graph"
    location = f"{code.co_filename}:{code.co_firstlineno}, {code.co_name}"
    fallback = Fallback("dynamo", reason, location)
    report = options.get("report") if isinstance(options, Mapping) else None
    if isinstance(report, str):
        os.makedirs(report, exist_ok=True)
        with open(os.path.join(report, EAGER_FILE), "a") as file:
            file.write(json.dumps({"location": location, "reason": reason}) + "\n")
    if fallback not in counters.snapshot().fallbacks:
        counters.add_fallback(fallback)
        log.warning("%s is not compiled and runs in eager, except for what it calls: %s", location, reason)
