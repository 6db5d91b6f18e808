"""Describe the collectives of a compiled graph, and how two ranks' sequences differ, without the compiler."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Signature = tuple["CollectiveCall", ...]


@dataclass(frozen=True)
class CollectiveCall:
    """One collective, described in words that are equal on every rank.

    Attributes:
        operator: its name; the same for the in-place and out variants.
        arguments: its arguments other than tensors and the group: kind of reduction, group sizes, roots.
        operands: dtype and sizes of each tensor. ``"<0>"`` stands for an expression of
            :class:`SymbolicSizes`, ``"?"`` for anything.
        carries: which values it carries: the inputs that it depends on, if these are parameters and user
            inputs, and the outputs that depend on it. Distinguishes two sums of equal shape.
        after: how many collectives precede it in the graph, of other groups that contain all ranks of this
            one (:func:`interleaved`).
        position: its index among all collectives of this rank's graph.
        source: the part of ``carries`` about inputs.
        results: the outputs that depend on it.
        returned: how many outputs of the graph have the same name on all ranks.
        computed: if several are alike in all of this, a digest, without numbers, of how each is computed and
            used.
        exactly: a digest that includes the numbers from which it is computed.
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
        """Return a copy comparable across graphs with other inputs, as one rank broke its graph elsewhere."""
        return dataclasses.replace(self, carries="", after="", computed="", exactly="", text="")

    def fits(self, other: CollectiveCall) -> bool:
        """Whether another rank may run ``other`` while this rank runs this call.

        >>> a = CollectiveCall("all_reduce", "'sum'", ("float32[4, ?]",), "")
        >>> a.fits(CollectiveCall("all_reduce", "'sum'", ("float32[4, 8]",), ""))
        True
        >>> a.fits(CollectiveCall("all_reduce", "'sum'", ("float32[5, 8]",), ""))
        False
        """
        return (
            (self.operator, self.arguments, self.after) == (other.operator, other.arguments, other.after)
            and self._carries_same_value(other)
            and len(self.operands) == len(other.operands)
            and all(map(_same_sizes, self.operands, other.operands))
        )

    def _carries_same_value(self, other: CollectiveCall) -> bool:
        """Whether both carry the same value. More may depend on it on a rank that returns more."""
        if self.carries == other.carries or self.source != other.source or self.returned == other.returned:
            return self.carries == other.carries
        mine, theirs = set(self.results), set(other.results)
        return bool(mine and theirs) and (mine <= theirs or theirs <= mine)


@dataclass(frozen=True)
class SizesOfCalls:
    """The symbolic sizes in a signature at a call.

    Attributes:
        shown: for each symbol, the position of the input that has it, and its dimension; ``None`` if the
            input is the number.
        names: the name of that dimension on every rank, or ``""``.
        values: maps the symbols' values to the sizes for ``"<0>"``, ``"<1>"`` and so on; ``None`` for those
            that no input has.
    """

    shown: Sequence[tuple[int, int | None]] = ()
    names: Sequence[str] = ()
    values: Callable[..., Sequence[int | None]] | None = None

    @property
    def any(self) -> bool:
        """Whether there are symbolic sizes."""
        return self.values is not None

    def of_call(self, inputs: Sequence[Any]) -> tuple[int, ...]:
        """Return the symbol values of a call; empty if all sizes are static."""
        return tuple(
            int(inputs[position] if dim is None else inputs[position].shape[dim])
            for position, dim in self.shown
        )

    def named(self, values: Sequence[int]) -> dict[str, int]:
        """Map the rank-independent names of a call's values, if they have one, to the values."""
        return {name: value for name, value in zip(self.names, values, strict=True) if name}

    def at(self, signature: Signature, values: Sequence[int]) -> Signature:
        """Substitute a call's sizes in a signature. A size that no input has stays ``"?"``.

        Args:
            signature: a signature that refers to these sizes.
            values: the result of :meth:`of_call`.
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
    """Return the index of the first collective in which two sequences do not fit, or ``None``."""
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if not one.fits(other):
            return number
    return _first_reordered(ours, theirs) if len(ours) == len(theirs) else min(len(ours), len(theirs))


def _first_reordered(ours: Sequence[CollectiveCall], theirs: Sequence[CollectiveCall]) -> int | None:
    """Return the index of the first collective that carries what another one does on the other rank.

    Returns ``None`` if there is none.

    What no other collective carries may be computed differently there, for example from a shard of another
    size.
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
