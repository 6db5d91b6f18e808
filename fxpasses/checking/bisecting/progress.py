"""Report the progress of a check on standard error: a live line in a terminal, else one line per stage."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.status import Status


class ProgressLine:
    """Reports the current step; a context manager.

    Args:
        shown: whether to print anything.
        console: where to print; standard error by default.
        name: starts each line that stays.
    """

    def __init__(
        self, shown: bool = True, console: Console | None = None, name: str = "fxpasses.check"
    ) -> None:
        self._shown, self._console = shown, console or Console(stderr=True)
        self._status: Status | None = None
        self._name = name
        self._since = time.monotonic()
        self._last = ""

    def __enter__(self) -> ProgressLine:
        if self._shown and self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def __call__(self, what: str, detail: str = "") -> None:
        """Report the current step. The detail is omitted where each line stays."""
        if not self._shown:
            return
        after = f"{time.monotonic() - self._since:6.1f} s"
        if self._status is not None:
            self._status.update(f"{after}  {what}" + (f": {detail}" if detail else ""))
        elif what != self._last:
            self._console.print(
                f"{self._name} {after}  {what}", markup=False, highlight=False, soft_wrap=True
            )
        self._last = what
