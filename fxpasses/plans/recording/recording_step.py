"""Keeps whatever watches a compilation from disturbing it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from fxpasses.plans.errors import NoPlan

log = logging.getLogger(__name__)


class CompilationRecorder(Protocol):
    """A recorder of a compilation."""

    is_over: bool

    def refuse(self, reason: str) -> None:
        """Give up on a plan, for this reason."""

    def end(self, path: Path | None, reason: str, where: str = "", *, lasting: bool = True) -> None:
        """End the recording.

        Args:
            path: the plan, or None.
            reason: why there is none, or "".
            where: the attribute, file or name that is the reason.
            lasting: whether later processes would find the same.
        """


def recording_step(method: Callable[..., None]) -> Callable[..., None]:
    """Make a method a step of a recorder. What it finds or raises costs the plan, never the compilation."""

    @functools.wraps(method)
    def step(self: CompilationRecorder, *args: Any) -> None:
        try:
            method(self, *args)
        except NoPlan as error:
            log.info("no plan: %s", error)
            self.refuse(error.reason)
        except Exception as error:
            log.warning("no plan: recording one failed", exc_info=error)
            reason = f"an error while recording: {type(error).__name__}"
            self.refuse(reason)
            if self.is_over:
                self.end(None, reason, lasting=False)

    return step
