"""Why a repeated piece of a graph cannot be compiled on its own."""

from __future__ import annotations

from fxpasses.errors import FxPassesError

__all__ = ["RegionContractError", "RegionRefused"]


class RegionRefused(FxPassesError):
    """A repeated piece stays part of the graph around it. Caught, and reported by :func:`fxpasses.regions`.

    Attributes:
        reason: why, in words.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"not compiled on its own: {reason}")


class RegionContractError(FxPassesError, RuntimeError):
    """A compiled region is called that this process does not have, or it does not return what was recorded.

    Attributes:
        key: the region's content hash.
        reason: what went wrong.
    """

    def __init__(self, key: str, reason: str) -> None:
        self.key, self.reason = key, reason
        super().__init__(
            f"region {key}: {reason}. Compile the model again with options={{'regions': 'off'}}."
        )
