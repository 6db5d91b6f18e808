"""Dynamo's frame hook leaves this package's own functions alone where torch calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from types import CodeType

import torch
from torch._dynamo import trace_rules

from fake.seam.patches import LEDGER, Edit, When


def is_skipped(code: CodeType) -> bool:
    """Whether Dynamo leaves frames of this code alone. Args: of a function that is not inlined."""
    return trace_rules.check(code)


def _unfit() -> str:
    """Without this set (torch 2.11) what user code calls would be skipped as well, which ends its graph."""
    known = hasattr(trace_rules, "BUILTIN_INLINE_WHEN_CALLED")
    return (
        "" if known else f"torch {torch.__version__} has no list of what is traced where user code calls it"
    )


def skipped_frames(package: str, when: When = When.USE) -> Edit:
    """An entry of the ledger: Dynamo's frame hook leaves the functions of ``package`` alone where torch calls them.

    The hook stays on behind a graph break in a compiled function, and torch's own tracing may begin there. What user
    code calls is traced into its graph as before.
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
