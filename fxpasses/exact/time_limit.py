"""A time limit for checks, which run graphs many times: it is looked at before each run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

_until: list[float] = []


class OutOfTime(BaseException):
    """A check takes longer than it may. No ``Exception``: nothing that was run is at fault."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise :class:`OutOfTime` from the first run of a graph after so many seconds."""
    _until.append(time.monotonic() + seconds)
    try:
        yield
    finally:
        _until.pop()


def spend_time() -> None:
    """Continue if there is time. Raises: OutOfTime: there is none."""
    if _until and time.monotonic() > _until[-1]:
        raise OutOfTime
