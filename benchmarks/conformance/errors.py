"""Errors of the conformance program for invalid options."""

from __future__ import annotations

__all__ = ["ConformanceOptionsError"]


class ConformanceOptionsError(ValueError):
    """Raised if an option of a conformance sweep names something unknown or selects nothing.

    Attributes:
        argument: the option at fault.
    """

    def __init__(self, message: str, *, argument: str) -> None:
        super().__init__(message)
        self.argument = argument
