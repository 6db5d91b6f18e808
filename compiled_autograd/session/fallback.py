"""Decide which backward passes run in eager, and word the reason."""

import functools
import re
import warnings

import torch

from compiled_autograd import _torch
from compiled_autograd.config import config
from compiled_autograd.errors import RefusedError
from compiled_autograd.runtime.running import EAGER, running
from fake.error_text import error_text
from fake.tracing.compiling import one_at_a_time

_CONCURRENT_CAPTURE = "within another compiled autograd call"
# C++'s refusal messages, and our wording.
_REFUSALS: tuple[tuple[str, str], ...] = (
    (r"NestedTensor support not implemented", "a NestedTensor gradient"),
    (r"'NestedIntNode' object has no attribute", "a ragged size that a node saved"),
    (
        r"view_fn not supported by compiled autograd",
        "an in-place operation on a view that only a function can redo",
    ),
    (r"can not trace unhashable IValues, error: (.*)", r"a C++ Function saved an unhashable value (\1)"),
    (r"TorchDispatchMode not yet implemented", "a TorchDispatchMode is active"),
    (_CONCURRENT_CAPTURE, "inside a captured pass with C++ hooks, or beside one of another thread"),
    (r"requires no threads in backwards", "another thread is inside a backward pass"),
    (r"compiled_args not implemented: (\S+)", r"node \1 tells C++ nothing about itself"),
    (r"apply_with_saved not implemented: (\S+)", r"node \1 cannot be recorded"),
    (
        r"(?:not implemented for|not supported by|doesn't support|does not support) compiled autograd",
        "{message}",
    ),
    (r"has no attribute 'symints'", "the backward of a compiled function is differentiated"),
    (r"[Cc]ompiled[ _][Aa]utograd", "{message}"),
)


def is_unknown_torch() -> bool:
    """Whether this torch's engine hook is unknown, so that nothing is captured. Warns once."""
    if _torch.HOOK_PROBLEM is None:
        return False
    _warn_of_unknown_torch()
    return True


@functools.cache
def _warn_of_unknown_torch() -> None:
    warnings.warn(
        "compiled_autograd does not know the engine hook of this torch, everything runs in eager: "
        f"{_torch.HOOK_PROBLEM}",
        stacklevel=5,
    )


def eager_reason() -> str | None:
    """Return why the backward pass about to start must run in eager, or None if it may be captured."""
    if running.stack and running.stack[-1] is EAGER:
        return "inside a backward pass that runs in eager"
    if len(running.stack) > config.max_nested_captures:
        return f"nested deeper than config.max_nested_captures = {config.max_nested_captures}"
    if torch.is_anomaly_enabled():
        with one_at_a_time:  # another thread may have turned it on while it traces
            if torch.is_anomaly_enabled():
                return "anomaly mode"
    if _torch.dispatch_mode_depth():
        return "a TorchDispatchMode is active"
    return None


def refusal_reason(error: BaseException) -> str | None:
    """Return why C++ or our recording refused a pass, or None if ``error`` is the pass's own error."""
    if isinstance(error, RefusedError):
        return error.reason
    if not isinstance(error, (AttributeError, NotImplementedError, RuntimeError)):
        return None
    message = error_text(error).split("\nException raised from", 1)[0]
    if "INTERNAL ASSERT FAILED" in message and _CONCURRENT_CAPTURE not in message:
        return None  # a walk that stopped midway may have changed nodes, so it cannot be retried
    for pattern, reason in _REFUSALS:
        found = re.search(pattern, message)
        if found:
            line = message.strip().splitlines()[0]
            return found.expand(reason) if "\\" in reason else reason.format(message=line)
    return None


def is_concurrent_capture(error: BaseException) -> bool:
    """Whether C++ refused a pass because it is nested in, or concurrent with, one that it captures."""
    return _CONCURRENT_CAPTURE in error_text(error)
