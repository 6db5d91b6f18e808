"""What the conformance program raises where its options make no sense."""

from __future__ import annotations

__all__ = ["ConformanceOptionsError"]


class ConformanceOptionsError(ValueError):
    """A conformance sweep was asked for something that there is not, or for nothing.

    Attributes:
        argument: the option at fault.
    """

    def __init__(self, message: str, *, argument: str) -> None:
        super().__init__(message)
        self.argument = argument
