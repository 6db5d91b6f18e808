"""What watches a compilation never disturbs it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from fxpasses.plans.errors import NoPlan

log = logging.getLogger(__name__)


class Watching(Protocol):
    """A recorder of a compilation."""

    is_over: bool

    def refuse(self, reason: str) -> None:
        """There will be no plan. Args: why."""

    def end(self, path: Path | None, reason: str, where: str = "", *, lasting: bool = True) -> None:
        """It is over. Args: the plan, or why there is none, where, and whether later processes would find the same."""


def beside_compilation(method: Callable[..., None]) -> Callable[..., None]:
    """A step of a recorder: what it finds, and what goes wrong in it, costs the plan, and never the compilation that it watches."""

    @functools.wraps(method)
    def step(self: Watching, *args: Any) -> None:
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
