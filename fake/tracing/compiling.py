"""Let only one thread compile at a time.

The state that torch's tracers set is process-wide: anomaly mode (for the stack traces of nodes), FX's tracing
flag, patched functions of torch and of ours. If two threads set and restore such state in turns, it stays
set. Dynamo holds a lock while it compiles a frame. Compilations outside of Dynamo (a backward graph at the
first backward pass, a segment of a captured pass, an explicit capture) must run inside :func:`compiling`,
which holds the same lock.

While another thread traces, FX's flag makes compiled functions refuse their calls, unless torch also reports
that it is compiling.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fake.seam.dynamo import compile_lock, compile_session

one_at_a_time = compile_lock
"""The lock alone, which is reentrant: for use around what a compilation sets or has made."""


@contextmanager
def compiling() -> Iterator[None]:
    """Compile in this block: no other thread compiles meanwhile, and torch reports that it is compiling."""
    with one_at_a_time, compile_session():
        yield
