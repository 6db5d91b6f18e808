"""Run calls in a child process: some of eager's kernels crash on wrong arguments instead of raising."""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
from collections.abc import Callable
from typing import Any

__all__ = ["isolated"]


def isolated(function: Callable[[], Any], *, seconds: float) -> Any:
    """Return the result of ``function`` in a forked child; ``None`` if it crashes or exceeds ``seconds``.

    >>> isolated(lambda: 1 + 1, seconds=10)
    2
    >>> isolated(lambda: os._exit(3), seconds=10) is None
    True
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(function(), pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    data = _read(reading, time.monotonic() + seconds)
    if data is None:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    try:
        return None if data is None else pickle.loads(data)
    except (EOFError, pickle.UnpicklingError):
        return None


def _read(descriptor: int, deadline: float) -> bytes | None:
    chunks: list[bytes] = []
    with os.fdopen(descriptor, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                return None
            chunk = pipe.read(1 << 16)
            if not chunk:
                return b"".join(chunks)
            chunks.append(chunk)
