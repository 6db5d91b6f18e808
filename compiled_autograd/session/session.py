"""Sessions: a stack per thread."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

from compiled_autograd.stats import Records
from fake.seam.patches import LEDGER, When


@dataclasses.dataclass(frozen=True)
class Session:
    """One ``enable``: its compiler, and whether sizes are symbolic from the first capture."""

    compiler: Any
    dynamic: bool


class Sessions(threading.local):
    """This thread's stack of sessions, innermost last. None stands for a ``disable``."""

    records = Records()

    def __init__(self) -> None:
        self.stack: list[Session | None] = []
        self.captures_later = False
        """Whether passes through what this thread is compiling now will be captured: see `expected`."""
        self._observers: list[Callable[[str, Any], None]] = []

    def current(self) -> Session | None:
        """Return the session of a backward pass that starts on this thread."""
        return self.stack[-1] if self.stack else None

    @contextlib.contextmanager
    def entered(self, session: Session | None) -> Iterator[None]:
        """Make ``session`` the current one. None disables capturing."""
        with LEDGER.in_force(*LEDGER.of(When.SESSION)):
            self.stack.append(session)
            try:
                yield
            finally:
                self.stack.pop()

    @contextlib.contextmanager
    def expected(self) -> Iterator[None]:
        """Wrap the compilation of a forward graph whose passes will be captured through its node.

        An ``enable`` or ``disable`` around it takes precedence.
        """
        if self.stack:
            yield
            return
        with self.entered(None):
            before, self.captures_later = self.captures_later, True
            try:
                yield
            finally:
                self.captures_later = before

    @contextlib.contextmanager
    def observed(self, observer: Callable[[str, Any], None]) -> Iterator[None]:
        """Call ``observer`` with the outcome and record of every backward pass of this thread."""
        self._observers.append(observer)
        try:
            yield
        finally:
            self._observers.remove(observer)

    def notify(self, outcome: str, record: Any) -> None:
        """Notify observers that a backward pass ended as ``capture``, ``hit`` or ``fallback``."""
        for observer in self._observers:
            observer(outcome, record)


sessions = Sessions()
