"""Make Dynamo's frame hook skip this package's own functions where torch calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from types import CodeType

import torch
from torch._dynamo import trace_rules

from fake.seam.patches import LEDGER, Edit, When


def is_skipped(code: CodeType) -> bool:
    """Return whether Dynamo skips frames of this code. Args: the code of a function that is not inlined."""
    return trace_rules.check(code)


def _unfit() -> str:
    """Return why this does not fit: without this set (torch 2.11), functions that user code calls would be
    skipped as well, which breaks its graph."""
    known = hasattr(trace_rules, "BUILTIN_INLINE_WHEN_CALLED")
    return (
        "" if known else f"torch {torch.__version__} has no list of what is traced where user code calls it"
    )


def skipped_frames(package: str, when: When = When.USE) -> Edit:
    """Return a ledger entry that makes Dynamo's frame hook skip ``package``'s
    functions where torch calls them.

    The hook stays active behind a graph break in a compiled function, and torch's own tracing may begin
    there. Functions that user code calls are traced into its graph as before.
    """

    @functools.cache
    def folder() -> str:
        spec = find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        return trace_rules._strip_init_py(spec.origin)

    def skip() -> Callable[[], None]:
        directory = folder()
        trace_rules.SKIP_DIRS.append(directory)
        trace_rules.BUILTIN_INLINE_WHEN_CALLED.add(directory)
        trace_rules._recompile_re()

        def undo() -> None:
            trace_rules.SKIP_DIRS.remove(directory)
            trace_rules.BUILTIN_INLINE_WHEN_CALLED.discard(directory)
            trace_rules._recompile_re()

        return undo

    return Edit(
        f"torch._dynamo.trace_rules.SKIP_DIRS: {package}",
        skip,
        when=when,
        versions=None,
        unfit=_unfit,
        lost=f"time: behind graph breaks Dynamo traces functions of {package} that torch calls",
    )


SKIPPED_FRAMES = LEDGER.add(skipped_frames("fake"))
