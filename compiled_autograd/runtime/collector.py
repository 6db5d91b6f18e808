"""The garbage collector, paused while a capture makes thousands of small objects that all stay.

Each of its runs would look at all of them again, and the time of a capture grow with the square of its length.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator

__all__ = ["collection_paused"]


class _Collector:
    """The one owner of the garbage collector while someone has it paused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pauses = 0
        self._was_on = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        with self._lock:
            self._pauses += 1
            if self._pauses == 1:
                self._was_on = gc.isenabled()
                gc.disable()
        try:
            yield
        finally:
            with self._lock:
                self._pauses -= 1
                if not self._pauses and self._was_on:
                    gc.enable()


_collector = _Collector()


def collection_paused() -> contextlib.AbstractContextManager[None]:
    """No garbage collection inside the block: for work that makes many objects that stay, and runs no user code."""
    return _collector.paused()
