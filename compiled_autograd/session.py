"""Who is enabled: a stack of sessions per thread, and what is installed in torch while any thread has one."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from compiled_autograd.stats import Ledger

__all__ = ["Session", "Sessions", "sessions"]


@dataclasses.dataclass(frozen=True)
class Session:
    """One ``enable``: which compiler gets the graphs, and whether sizes are symbolic from the first capture."""

    compiler: Any
    dynamic: bool


class Sessions(threading.local):
    """The stack of this thread, innermost last; None stands for a ``disable``."""

    ledger = Ledger()

    def __init__(self) -> None:
        self.stack: list[Session | None] = []

    def current(self) -> Session | None:
        """The session that a backward pass on this thread belongs to."""
        return self.stack[-1] if self.stack else None


class Installation:
    """Installs something in torch while at least one session is enabled in any thread."""

    def __init__(self, install: Callable[[], Callable[[], None]]) -> None:
        self._install = install
        self._lock = threading.Lock()
        self._users = 0
        self._uninstall: Callable[[], None] | None = None

    def acquire(self) -> None:
        """One more session."""
        with self._lock:
            if self._users == 0:
                self._uninstall = self._install()
            self._users += 1

    def release(self) -> None:
        """One session less; the last one puts torch back as it was."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._uninstall is not None:
                self._uninstall()
                self._uninstall = None


sessions = Sessions()
