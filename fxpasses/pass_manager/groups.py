"""Groups of passes that run repeatedly until none of them changes anything."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fxpasses.errors import ContractError
from fxpasses.pass_manager.pass_base import Contract, Metadata, Numerics, Pass

_NUMERICS: tuple[Numerics, ...] = ("bitwise", "tolerance", "none")
_METADATA: tuple[Metadata, ...] = ("exact", "types", "outputs")


class FixpointWarning(UserWarning):
    """A group of passes still changed the graph when it reached its limit."""


@dataclass(frozen=True)
class Fixpoint(Pass):
    """Passes that run one after the other, round after round, until a round changes nothing.

    A pass manager runs, checks and records each member separately. In the order of a pipeline, the group is
    one pass whose contract combines those of its members.

    Attributes:
        name: the group's name.
        passes: the members, in order.
        limit: the maximum number of rounds. A group that still changes something then stops with a warning.

    Raises:
        ContractError: if the group is empty or the limit is below 1.
    """

    name: str  # type: ignore[misc]
    passes: tuple[Pass, ...]
    limit: int = 10

    def __post_init__(self) -> None:
        if type(self.limit) is not int:
            raise ContractError(f"fixpoint: limit is {self.limit!r}, not an integer", [self.name])
        if not self.passes or self.limit < 1:
            raise ContractError(
                f"a fixpoint group needs at least one pass and one round, got {len(self.passes)} passes "
                f"and limit {self.limit}",
                [self.name],
            )

    @property
    def contract(self) -> Contract:  # type: ignore[override]
        contracts = [item.contract for item in self.passes]
        provided = {item.name for item in self.passes}.union(*(c.provides for c in contracts))
        return Contract(
            graphs=frozenset().union(*(c.graphs for c in contracts)),
            requires=frozenset().union(*(c.requires for c in contracts)) - provided,
            provides=provided,
            invalidates=frozenset().union(*(c.invalidates for c in contracts)) - provided,
            conflicts=frozenset().union(*(c.conflicts for c in contracts)),
            numerics=max((c.numerics for c in contracts), key=_NUMERICS.index),
            metadata=max((c.metadata for c in contracts), key=_METADATA.index),
        )

    def apply(self, gm: fx.GraphModule) -> bool:
        """Run the group without a manager, unchecked."""
        for number in range(self.limit):
            changed = [item.apply(gm) for item in self.passes]
            if not any(changed):
                return number > 0
        return True

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.passes))})"


def fixpoint(*passes: Pass, limit: int = 10, name: str | None = None) -> Fixpoint:
    """Make a group of passes that run until none of them changes anything.

    Raises:
        ContractError: if the group is empty, an item is not a pass, or the limit is not a positive integer.

    >>> from fxpasses.passes import EliminateDeadCode, RemoveNoOps
    >>> str(fixpoint(RemoveNoOps(), EliminateDeadCode(), limit=4))
    'remove_no_ops+eliminate_dead_code(remove_no_ops, eliminate_dead_code)'
    """
    for item in passes:
        if not isinstance(item, Pass):
            raise ContractError(f"fixpoint: {item!r} is no Pass; wrap a function with fxpasses.graph_pass")
    if not isinstance(name, str | None):
        raise ContractError(f"fixpoint: name is {name!r}; pass text, or None for the names of its passes")
    return Fixpoint(passes=passes, name=name or "+".join(item.name for item in passes), limit=limit)
