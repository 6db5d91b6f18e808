"""Private torch names of frame evaluation, which torch does in C++ without Dynamo."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from fake.seam import eval_frame as _eval
from fxpasses.plans._torch import RootGuardManager

set_hook = _eval.set_eval_frame
"""Sets the hook that is called for frames of this thread without code whose guards hold, such as Dynamo's
callback; returns the previous hook. With None, frames do not even run existing compiled code."""


_SKIP = _eval.FrameExecStrategy(_eval.FrameAction.SKIP, _eval.FrameAction.DEFAULT)


class _RunUncompiled:
    """A callback's answer that compiles neither this frame nor those that it calls."""

    guarded_code = None
    frame_exec_strategy = _eval.FrameExecStrategy(_eval.FrameAction.DEFAULT, _eval.FrameAction.DEFAULT)
    apply_to_code = False


class _SkipFromNowOn:
    """The answer for code that Dynamo would also skip from now on."""

    guarded_code = None
    frame_exec_strategy = _SKIP
    apply_to_code = True


def _run_uncompiled(frame: Any, entry: Any, state: Any) -> Any:
    from fake.seam.skipped_frames import is_skipped  # (imports Dynamo, which is there by now)

    return _SkipFromNowOn if is_skipped(frame.f_code) else _RunUncompiled


def cache_entries_only_hook() -> Any:
    """A hook that lets frames run the code from :func:`install_replacement`, or else their own.

    ``False`` does that in nanoseconds a frame, where a callback takes microseconds. But it also lets frames
    run what other calls of ``torch.compile`` compiled for their code, by any backend. A callback may only run
    code of its own backend, and no code of Dynamo's is. So ``False`` is for processes in which Dynamo has
    compiled nothing: any of torch's optimizers imports it.
    """
    if "torch._dynamo.convert_frame" not in sys.modules:
        return False
    from fake.seam.dynamo import has_seen_frames  # (imports Dynamo)

    return _run_uncompiled if has_seen_frames() else False


def skipped_by_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function so that Dynamo skips its own frame. Returns the function."""
    assert isinstance(function, types.FunctionType)
    _eval.set_code_exec_strategy(function.__code__, _SKIP)
    return function


class _AlwaysTrueGuards:
    """Guards that always hold, in the form of cache entries."""

    def __init__(self) -> None:
        self.root = RootGuardManager()


def install_replacement(code: types.CodeType, replacement: types.CodeType) -> None:
    """Make frames of one code run another, wherever a hook is set.

    Args:
        code: of the function that is called.
        replacement: has the same parameters, local variables and cells.
    """
    if not _eval.entries_of(code):
        guards: Any = _AlwaysTrueGuards()
        _eval.load_entry(code, guards, replacement)
