"""Who is enabled: a stack of sessions per thread, and what is installed in torch while any thread has one."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

from compiled_autograd.stats import Ledger

__all__ = ["Session", "Sessions", "installation", "sessions"]


@dataclasses.dataclass(frozen=True)
class Session:
    """One ``enable``: which compiler gets the graphs, and whether sizes are symbolic from the first capture."""

    compiler: Any
    dynamic: bool


class Installation:
    """Installs something in torch while at least one session is enabled in any thread."""

    def __init__(self) -> None:
        self.install: Callable[[], Callable[[], None]] | None = None
        """Installs, and returns how to undo it; set once, by the module that knows what to install."""
        self._lock = threading.Lock()
        self._users = 0
        self._finalized: list[None] = []
        self._uninstall: Callable[[], None] | None = None

    def acquire(self) -> None:
        """One more session."""
        with self._lock:
            self._count(+1)

    def release(self) -> None:
        """One session less; the last one puts torch back as it was."""
        with self._lock:
            self._count(-1)

    def release_from_finalizer(self) -> None:
        """`release`, where the garbage collector may have come in between, in a thread that holds the lock."""
        self._finalized.append(None)
        if self._lock.acquire(blocking=False):
            try:
                self._count(0)
            finally:
                self._lock.release()

    def _count(self, change: int) -> None:
        if change > 0 and self._users == 0 and self.install is not None:
            self._uninstall = self.install()
        self._users += change
        while self._finalized:
            self._finalized.pop()
            self._users -= 1
        if self._users == 0 and self._uninstall is not None:
            self._uninstall()
            self._uninstall = None


installation = Installation()


class Sessions(threading.local):
    """The stack of this thread, innermost last; None stands for a ``disable``."""

    ledger = Ledger()

    def __init__(self) -> None:
        self.stack: list[Session | None] = []
        self._observers: list[Callable[[str, Any], None]] = []

    def current(self) -> Session | None:
        """The session that a backward pass on this thread belongs to."""
        return self.stack[-1] if self.stack else None

    @contextlib.contextmanager
    def entered(self, session: Session | None) -> Iterator[None]:
        """Make ``session`` the current one; None for none at all."""
        installation.acquire()
        self.stack.append(session)
        try:
            yield
        finally:
            self.stack.pop()
            installation.release()

    @contextlib.contextmanager
    def observed(self, observer: Callable[[str, Any], None]) -> Iterator[None]:
        """Tell ``observer`` of every backward pass of this thread: its outcome, and its record."""
        self._observers.append(observer)
        try:
            yield
        finally:
            self._observers.remove(observer)

    def tell(self, outcome: str, record: Any) -> None:
        """A backward pass is over: ``capture``, ``hit`` or ``fallback``."""
        for observer in self._observers:
            observer(outcome, record)


sessions = Sessions()
