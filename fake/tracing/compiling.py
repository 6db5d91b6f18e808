"""One thread compiles at a time.

What torch's tracers set is the whole process's: anomaly mode (for the stack traces of nodes), FX's flag that something is
traced, patched functions of torch and of ours. Two threads that set and restore such a thing in turns leave it set.
Dynamo holds a lock while it compiles a frame; what compiles outside of it (a backward graph at the first backward
pass, a segment of a captured pass, an explicit capture) is to do so inside of :func:`compiling`, which holds the same.

While another thread traces, FX's flag makes compiled functions refuse their calls, unless torch says at the same time
that it compiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fake.seam.dynamo import compile_lock, compile_session

one_at_a_time = compile_lock
"""The lock alone, which a thread may take again: around what a compilation sets or has made."""


@contextmanager
def compiling() -> Iterator[None]:
    """Compile in this block: no other thread does meanwhile, and torch knows that something is compiled."""
    with one_at_a_time, compile_session():
        yield
