"""A time limit for checks, which run graphs many times: it is looked at before each run."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from contextvars import ContextVar

_deadline = ContextVar("deadline", default=math.inf)
"""Of this thread. Others may compile meanwhile."""


class OutOfTime(BaseException):
    """A check takes longer than it may. No ``Exception``: nothing that was run is at fault."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise :class:`OutOfTime` from the first run of a graph after so many seconds."""
    before = _deadline.set(min(_deadline.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _deadline.reset(before)


def raise_if_out_of_time() -> None:
    """Raise :class:`OutOfTime` if the time is up."""
    if time.monotonic() > _deadline.get():
        raise OutOfTime
