"""Errors of regions: why a repeated subgraph cannot be compiled on its own."""

from __future__ import annotations

from fxpasses.errors import FxPassesError


class RegionRefused(FxPassesError):
    """A repeated subgraph stays in the surrounding graph. Caught, and reported by :func:`fxpasses.regions`.

    Attributes:
        reason: why, in words.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"not compiled on its own: {reason}")


class RegionGraphError(FxPassesError, TypeError):
    """The argument of :func:`fxpasses.regions` is not a graph, or its fake values are unknown.

    Attributes:
        given: the argument.
    """

    def __init__(self, given: object, problem: str) -> None:
        self.given = given
        super().__init__(
            f"{problem}. fxpasses.regions takes Dynamo's graph, or one of fxpasses.capture(model, *inputs), as in "
            "fxpasses.regions(fxpasses.capture(model, *inputs).forward)."
        )


class RegionContractError(FxPassesError, RuntimeError):
    """A called region does not exist in this process, or does not return what was recorded.

    Attributes:
        key: the region's content hash.
        reason: what went wrong.
    """

    def __init__(self, key: str, reason: str) -> None:
        self.key, self.reason = key, reason
        super().__init__(
            f"region {key}: {reason}. Compile the model again with options={{'regions': 'off'}}."
        )
