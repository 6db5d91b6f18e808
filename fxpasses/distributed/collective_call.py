"""One collective of a compiled graph in words, and how two ranks' sequences of them differ: without anything of a compiler."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Signature = tuple["CollectiveCall", ...]


@dataclass(frozen=True)
class CollectiveCall:
    """One collective, in words that are the same on every rank.

    Attributes:
        operator: its name, that of the form that writes into its argument being the same.
        arguments: what it is given besides tensors and the group: the kind of reduction, sizes of groups, roots.
        operands: dtype and sizes of each tensor; ``"<0>"`` stands for an expression of :class:`SymbolicSizes`, ``"?"`` for what may be anything.
        carries: which values it carries: the inputs that it depends on, if these are parameters and inputs of the user, and the outputs that depend
            on it. It tells two sums of equal shape apart.
        after: how many collectives of other groups that all ranks of this one are in come before it in the graph (:func:`interleaved`).
        position: its number among all collectives of this rank's graph.
        source: the part of ``carries`` that tells what it is computed from.
        results: the outputs that depend on it.
        returned: how many outputs the graph has that all ranks call the same.
        computed: of several that are alike in all of this, how each one is computed, and what is computed of it: a digest, without numbers.
        exactly: with the numbers of what it is computed from.
        text: how it is computed, for people.
    """

    operator: str
    arguments: str
    operands: tuple[str, ...]
    carries: str
    after: str = ""
    position: int = dataclasses.field(default=0, compare=False, repr=False)
    source: str = dataclasses.field(default="", compare=False, repr=False)
    results: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)
    returned: int = dataclasses.field(default=0, compare=False, repr=False)
    computed: str = dataclasses.field(default="", compare=False)
    exactly: str = dataclasses.field(default="", compare=False, repr=False)
    text: str = dataclasses.field(default="", compare=False, repr=False)

    def __str__(self) -> str:
        given = ", ".join(filter(None, (*self.operands, self.arguments)))
        source = f" of {self.carries}" if self.carries else ""
        more = (f" = {self.text}" if self.text else "", source, f" after {self.after}" if self.after else "")
        return f"{self.operator}({given})" + "".join(more)

    def of_other_inputs(self) -> CollectiveCall:
        """As it can be compared with that of a graph which has other inputs, as one rank broke its graph elsewhere."""
        return dataclasses.replace(self, carries="", after="", computed="", exactly="", text="")

    def fits(self, other: CollectiveCall) -> bool:
        """Whether another rank may run ``other`` where this one runs this.

        >>> a = CollectiveCall("all_reduce", "'sum'", ("float32[4, ?]",), "")
        >>> a.fits(CollectiveCall("all_reduce", "'sum'", ("float32[4, 8]",), ""))
        True
        >>> a.fits(CollectiveCall("all_reduce", "'sum'", ("float32[5, 8]",), ""))
        False
        """
        return (
            (self.operator, self.arguments, self.after) == (other.operator, other.arguments, other.after)
            and self._carries_what(other)
            and len(self.operands) == len(other.operands)
            and all(map(_same_sizes, self.operands, other.operands))
        )

    def _carries_what(self, other: CollectiveCall) -> bool:
        """Whether both carry the same value: more may depend on it in the graph of a rank that returns more."""
        if self.carries == other.carries or self.source != other.source or self.returned == other.returned:
            return self.carries == other.carries
        mine, theirs = set(self.results), set(other.results)
        return bool(mine and theirs) and (mine <= theirs or theirs <= mine)


@dataclass(frozen=True)
class SizesOfCalls:
    """What the symbolic sizes in a signature are at a call.

    Attributes:
        shown: for each symbol the position of the input that shows it, and its dimension; ``None`` where the input is the number.
        names: what every rank calls that dimension, or ``""``.
        values: of the symbols' values: what stands for ``"<0>"``, ``"<1>"`` and so on; ``None`` for what no input shows.
    """

    shown: Sequence[tuple[int, int | None]] = ()
    names: Sequence[str] = ()
    values: Callable[..., Sequence[int | None]] | None = None

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return self.values is not None

    def of_call(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """The values of the symbols in a call's collectives; nothing where all sizes are numbers."""
        return tuple(
            int(inputs[position] if dim is None else inputs[position].shape[dim])
            for position, dim in self.shown
        )

    def named(self, values: Sequence[int]) -> dict[str, int]:
        """Values of a call by what every rank calls them, where it has a name."""
        return {name: value for name, value in zip(self.names, values, strict=True) if name}

    def at(self, signature: Signature, values: Sequence[int]) -> Signature:
        """A signature with its sizes at a call; one that no input shows stays ``"?"``.

        Args:
            signature: one that was written with these.
            values: from :meth:`of_call`.
        """
        if self.values is None:
            return signature
        texts = ["?" if value is None else str(value) for value in self.values(*values)]

        def number(match: re.Match[str]) -> str:
            return texts[int(match[1])]

        return tuple(
            dataclasses.replace(call, operands=tuple(_SYMBOLIC.sub(number, text) for text in call.operands))
            for call in signature
        )


_SYMBOLIC = re.compile(r"<(\d+)>")


def first_difference(ours: Sequence[CollectiveCall], theirs: Sequence[CollectiveCall]) -> int | None:
    """The number of the first collective in which two sequences do not fit, or ``None``."""
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if not one.fits(other):
            return number
    return _moved(ours, theirs) if len(ours) == len(theirs) else min(len(ours), len(theirs))


def _moved(ours: Sequence[CollectiveCall], theirs: Sequence[CollectiveCall]) -> int | None:
    """The number of the first of several collectives that fit, and carry on one rank what others of them do on the other, or ``None``.

    What no other one carries may be computed in another way there: of a shard of another size, say.
    """
    alike: dict[Any, list[tuple[int, CollectiveCall, CollectiveCall]]] = {}
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.carries == b.carries and a.computed and b.computed:
            alike.setdefault((a.operator, a.arguments, a.carries, a.after), []).append((number, a, b))
    moved = []
    for calls in alike.values():
        for values in (
            [(n, (*a.operands, a.computed), (*b.operands, b.computed)) for n, a, b in calls],
            [(n, (*a.operands, a.exactly), (*b.operands, b.exactly)) for n, a, b in calls],
        ):
            left, before = [value for value in values if value[1] != value[2]], -1
            while len(left) != before:
                before = len(left)
                both = {a for _, a, _ in left} & {b for _, _, b in left}
                left = [value for value in left if both.issuperset(value[1:])]
            moved += [number for number, *_ in left[:1]]
    return min(moved, default=None)


def _same_sizes(one: str, other: str) -> bool:
    ours, theirs = (re.split(r"[\[\], ]+", text) for text in (one, other))
    return len(ours) == len(theirs) and all(
        a == b or "?" in (a, b) or a.startswith("<") or b.startswith("<")
        for a, b in zip(ours, theirs, strict=True)
    )
