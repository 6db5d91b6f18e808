"""Who is enabled: a stack of sessions per thread."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

from compiled_autograd.stats import Records
from fake.seam.patches import LEDGER, When


@dataclasses.dataclass(frozen=True)
class Session:
    """One ``enable``: which compiler gets the graphs, and whether sizes are symbolic from the first capture."""

    compiler: Any
    dynamic: bool


class Sessions(threading.local):
    """The stack of this thread, innermost last; None stands for a ``disable``."""

    records = Records()

    def __init__(self) -> None:
        self.stack: list[Session | None] = []
        self.captures_later = False
        """Whether backward passes through what this thread compiles right now will be captured: see `expected`."""
        self._observers: list[Callable[[str, Any], None]] = []

    def current(self) -> Session | None:
        """The session that a backward pass on this thread belongs to."""
        return self.stack[-1] if self.stack else None

    @contextlib.contextmanager
    def entered(self, session: Session | None) -> Iterator[None]:
        """Make ``session`` the current one; None for none at all."""
        with LEDGER.in_force(*LEDGER.of(When.SESSION)):
            self.stack.append(session)
            try:
                yield
            finally:
                self.stack.pop()

    @contextlib.contextmanager
    def expected(self) -> Iterator[None]:
        """For the compilation of a forward graph, before there is an autograd node whose passes can be captured.

        An ``enable`` or ``disable`` around it counts for more.
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
