"""One comparison at the job's store: ranks bring what they will send, and missing ones are reported."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fxpasses.distributed.answering import ASK_AFTER, SILENT_AFTER, STUCK_AFTER, Answering, wait_for_key
from fxpasses.distributed.collective_call import CollectiveCall, Signature, first_difference
from fxpasses.errors import RankMismatchError
from fxpasses.ranks.here import HERE, job_store

if TYPE_CHECKING:
    from fxpasses.compiling.history import Compilation

log = logging.getLogger(__name__)


def key(group: str, ranks: Sequence[int]) -> str:
    """Return one name for a group on all its ranks. Groups of other ranks may have the same name."""
    return f"{group}/{ranks[0]}.{len(ranks)}"


def _round(key: str, number: int) -> Any:
    """Return the part of the store for one comparison in a group."""
    return dist.PrefixStore(f"fxpasses/{key}/{number}", job_store())


class EagerCollectives:
    """Tracks how long missing ranks have been inside collectives that are not compiled.

    If all are, and the others at the gate, none can go on. Known only if the group has all ranks of the job.
    """

    def __init__(self, known: bool, seconds: float | None = None) -> None:
        self._known, self._seconds = known, seconds
        self._since: dict[int, tuple[str, float]] = {}

    def of_all(self, missing: Sequence[int], rank: int, where: str) -> str:
        """Return where a rank is, if all missing ranks are stuck in such collectives; else ``""``.

        Args:
            missing: the ranks that have not come.
            rank: one of them.
            where: the line that called its current collective, or ``""``.
        """
        if not where or self._since.get(rank, ("", 0.0))[0] != where:
            self._since[rank] = (where, time.monotonic())
        now, long = time.monotonic(), STUCK_AFTER if self._seconds is None else self._seconds
        stuck = all(
            (found := self._since.get(one)) is not None and found[0] and now - found[1] > long
            for one in missing
        )
        return where if self._known and stuck else ""


def _format_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")


class Gate:
    """One call at the store, for one process group."""

    def __init__(self, key: str, ranks: Sequence[int], number: int) -> None:
        """Args: the group's name on all ranks, its ranks, and the call's number among such graphs."""
        self.rank, self.ranks = dist.get_rank(), ranks
        self.key, self.number = key, number

    @functools.cached_property
    def store(self) -> Any:
        """The part of the job's store for this comparison."""
        return _round(self.key, self.number)

    @functools.cached_property
    def patience(self) -> datetime.timedelta:
        """How long ranks wait for each other."""
        return job_store().timeout  # type: ignore[no-any-return]

    def waits(self, offer: Offer) -> dict[str, Any]:
        """Return what this rank reports to ranks that wait for it while it waits here."""
        return {"key": self.key, "ranks": list(self.ranks), "number": self.number, "sends": offer.sends()}

    def all_send(self, offer: Offer, exchangeable: bool) -> bool:
        """Whether all ranks soon come with what they sent before, and it is equal: two store operations.

        Args:
            offer: what this rank sends.
            exchangeable: whether several functions, or graphs of one, send it. Those must be equal, too.
        """
        same = f"{offer.sent} by {offer.function} {offer.graph}" if exchangeable else offer.sent
        last = self.store.add(same, 1) == len(self.ranks)
        if last or wait_for_key(self.store, "open", ASK_AFTER):
            opened = self.store.compare_set("open", "", _YES + _AS_BEFORE) if last else self.store.get("open")
            if _AS_BEFORE in opened.decode():  # unless another rank asked or gave up first
                self._delete_previous((), ("open", same) if last else ())
                return True
        return False

    def come(self, offer: Offer, made: Compilation | None, symbolic: bool) -> Opened:
        """Wait until all ranks have come with what fits, or are known not to need to come.

        Args:
            offer: what this rank sends.
            made: what decided its compilation, if it was compiled anew.
            symbolic: whether the sizes that it sends are symbolic in its graph.

        Returns:
            How the gate was opened.

        Raises:
            RankMismatchError: if a rank came with something else, or does not come.
        """
        if first := self.store.add("came first", 1) == 1:
            self.store.set("first", offer.to_json())
        reference = Offer.from_json(self.store.get("first"))
        difference = _difference(reference, offer)
        if difference:
            self.store.compare_set("differs", "", str(self.rank))
        if symbolic:
            self.store.set("symbolic", "")
        if len(offer.functions) > 1 or offer.has_others:
            self.store.set("exchangeable", "")
        self.store.set(f"came/{self.rank}", "")
        last = self.store.add("came", 1) == len(self.ranks)
        if last:
            self._open(all_came=True)
        elif first:
            self._poll_missing_ranks(offer)
        else:
            self._wait(["open"], self.patience, offer.what)
        verdict = self.store.get("open").decode()
        if not verdict.startswith(_YES):
            raise RankMismatchError(**json.loads(verdict))
        if self.store.check(["differs"]):
            self._fail(reference.rank, int(self.store.get("differs")), difference, made)
        self._delete_previous((f"came/{self.rank}",), _SHARED if last else ())
        return Opened(_SYMBOLIC in verdict, _EXCHANGEABLE in verdict, _AS_BEFORE in verdict)

    def _open(self, all_came: bool = False) -> None:
        verdict = _YES + (_SYMBOLIC if self.store.check(["symbolic"]) else "")
        if all_came and self.store.check(["exchangeable"]):
            verdict += _EXCHANGEABLE
        self.store.compare_set("open", "", verdict)

    def _delete_previous(self, own: Sequence[str], shared: Sequence[str]) -> None:
        """Delete what the previous comparison left in the store. Every rank that is here has passed it.

        Args:
            own: what this rank leaves in the store now.
            shared: what all of them leave, if this is the last rank.
        """
        before, names = HERE.compared.get(self.key, (0, ()))
        HERE.compared[self.key] = self.number, (*own, *shared)
        for name in names:
            _round(self.key, before).delete_key(name)

    def refuse(self, error: RankMismatchError) -> None:
        """Close the gate: every rank that comes gets this error."""
        self._close(str(error), error.ranks)

    def _close(
        self, problem: str, ranks: Sequence[int], factor: str = "", values: Sequence[str] = ()
    ) -> None:
        self.store.compare_set("open", "", _error_json(problem, ranks, factor, values))

    def _wait(self, keys: list[str], patience: datetime.timedelta, what: str) -> None:
        try:
            self.store.wait(keys, patience)
        except dist.DistStoreError:
            raise RankMismatchError(
                f"rank {self.rank} waited {patience} for the other ranks to compile the {what}, and nobody said why they did not",
                (self.rank,),
            ) from None

    def _poll_missing_ranks(self, offer: Offer) -> None:
        """Wait for the last rank. Meanwhile, find out whether a rank will never come."""
        started, heard, fitting, warned = time.monotonic(), dict[int, float](), set[int](), set[int]()
        eager = EagerCollectives(len(self.ranks) == dist.get_world_size())
        patience = self.patience.total_seconds()
        most_silent = min(SILENT_AFTER, patience / 2)
        pause = _FIRST_ASK  # in seconds; a rank that reuses its code need not come, and answers at once
        while not wait_for_key(self.store, "open", min(pause, ASK_AFTER / 2)):
            pause *= 2
            missing = [rank for rank in self._missing(list(self.ranks)) if rank not in fitting]
            if not missing:
                if fitting:
                    return self._open()
                continue
            for rank in missing[:_ASKED_AT_ONCE]:
                if end := Answering.end_of(rank):
                    return self._give_up(rank, offer, f"has ended. {_DIFFERS}" if end == "has ended" else end)
                state = Answering.ask(rank, self.key, self.number)
                if state is not None:
                    heard[rank] = time.monotonic()
                    if state["sent"]:  # it has begun this call
                        theirs = Offer.from_json(state["sent"])
                        difference = _difference(theirs, offer)
                        if difference:
                            return self._close(
                                f"rank {rank} and rank {self.rank} send what does not fit together. {difference.text}",
                                (rank, self.rank),
                                difference.factor,
                                difference.values,
                            )
                        if not state["comes"] or (state["waits"] and state["waits"]["key"] != self.key):
                            fitting.add(rank)
                    elif where := eager.of_all(missing, rank, state["eager"]):
                        return self._give_up(
                            rank, offer, f"is inside of {where}, which is not compiled there. {_DIFFERS}"
                        )
                    elif cycle := self._find_cycle(rank, state["waits"]):
                        return self._fail_deadlock(cycle, offer)  # none can leave before the next one comes
                    continue
                silent = time.monotonic() - heard.get(rank, started)
                if silent > STUCK_AFTER and rank not in warned:
                    warned.add(rank)
                    log.warning(
                        "rank %d waits for rank %d, which does not answer: it has not called torch.compile yet, has ended, or hangs",
                        self.rank,
                        rank,
                    )
                if silent > most_silent:
                    return self._give_up(
                        rank,
                        offer,
                        f"has not answered for {silent:.0f} s: it has ended, hangs, or has compiled nothing yet",
                    )
            if fitting.issuperset(missing):
                return self._open()
            if time.monotonic() - started > patience:
                return self._give_up(missing[0], offer, f"was waited for during {self.patience}. {_DIFFERS}")

    def _waits_for_this(self, waits: dict[str, Any] | None) -> bool:
        """Whether a rank that must come here waits for this one in another group."""
        return (
            waits is not None
            and waits["key"] != self.key
            and self.rank in waits["ranks"]
            and HERE.calls[waits["key"]] <= waits["number"]
        )

    def _find_cycle(self, rank: int, waits: dict[str, Any] | None) -> list[tuple[int, dict[str, Any]]]:
        """Return ranks that each wait for the next in another group, the last for this rank; or nothing.

        Args:
            rank: the first of them, for which this rank waits.
            waits: where that rank waits.
        """
        found: list[tuple[int, dict[str, Any]]] = []
        while waits is not None:
            found.append((rank, waits))
            if self._waits_for_this(waits):
                return found
            passed = {self.rank, *(one for one, _ in found)}
            for other in [one for one in waits["ranks"] if one not in passed][:_ASKED_AT_ONCE]:
                state = Answering.ask(other, waits["key"], waits["number"])
                if state is not None and not state["sent"] and state["waits"]:
                    rank, waits = other, state["waits"]
                    break
            else:
                return []
        return []

    def _fail_deadlock(self, cycle: Sequence[tuple[int, dict[str, Any]]], offer: Offer) -> None:
        """Fail all ranks of a deadlock across groups. Args: the others, where they wait, and the offer."""
        ranks = (self.rank, *(rank for rank, _ in cycle))
        gates = [(self.key, self.ranks, self.number, offer.sends())]
        gates += [(waits["key"], waits["ranks"], waits["number"], waits["sends"]) for _, waits in cycle]
        groups = [f"{key} (ranks {_format_ranks(members)})" for key, members, _, _ in gates]
        told = ". ".join(
            f"Rank {rank}: group {group}, {sends}"
            for rank, group, (*_, sends) in zip(ranks, groups, gates, strict=True)
        )
        problem = (
            f"{' and '.join(f'rank {rank}' for rank in ranks)} wait for each other: the first collectives of what they compiled belong to different process groups. "
            f"{told}. Look for what gives them other groups, or another order of them (meshes, branches on the rank)."
        )
        error = _error_json(problem, ranks, "process group", groups)
        for key, _, number, _ in gates:
            _round(key, number).compare_set("open", "", error)

    def _give_up(self, missing: int, offer: Offer, why: str) -> None:
        problem = f"rank {self.rank} compiled the {offer.what}, {offer.sends()}; rank {missing} does not come: it {why}"
        self._close(problem, [missing])

    def _missing(self, ranks: list[int]) -> list[int]:
        """Return those of ``ranks`` that have not come. Takes few queries if few are missing."""
        if self.store.check([f"came/{rank}" for rank in ranks]):
            return []
        half = len(ranks) // 2
        return ranks if not half else self._missing(ranks[:half]) + self._missing(ranks[half:])

    def _fail(self, first: int, other: int, difference: _Difference | None, made: Compilation | None) -> None:
        """Raise on every rank, with the reason from the records of the first rank here and one that differs.

        Args:
            first: the first rank at the gate.
            other: the first rank that came with something else.
            difference: how this rank differs.
            made: what decided this rank's compilation, if it was compiled anew.
        """
        if self.rank in (first, other):
            self.store.set(f"made/{self.rank}", made.to_json() if made is not None else "")
        if self.rank == other:
            assert difference is not None
            self.store.set("difference", json.dumps(dataclasses.astuple(difference)))
        from fxpasses.compiling.history import Compilation, explain_miss  # lazy: imports Dynamo

        records = []
        for rank in (first, other):
            self._wait([f"made/{rank}"], self.patience, "record of a compilation")
            record = self.store.get(f"made/{rank}").decode()
            records += [Compilation.from_json(record)] if record else []
        text, factor, values, by_size = json.loads(self.store.get("difference"))
        verb = "compiled" if made is not None else "send"
        message = f"rank {other} and rank {first} {verb} collectives that do not fit together. "
        differences = explain_miss(*records).differences if len(records) == 2 and not by_size else ()
        if differences:
            factor, values = differences[0].factor, (differences[0].first, differences[0].second)
            message += f"What differs first between the two compilations (rank {first} -> rank {other}): {differences[0]}. "
        raise RankMismatchError(message + text, (first, other), factor, values)


_YES, _AS_BEFORE = "all have come", ", and send the same as before"
_SYMBOLIC, _EXCHANGEABLE = ", sizes are symbolic", ", several send the same"
_SHARED = ("came first", "first", "symbolic", "exchangeable", "came", "open")
_DIFFERS = (
    "It compiled other code, or did not have to compile again where this rank did: look for what differs between the ranks "
    "(sizes of inputs, graph breaks, branches on the rank)."
)
_ASKED_AT_ONCE = 4
_FIRST_ASK = 0.1
_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Opened:
    """How a gate was opened.

    Attributes:
        symbolic: some rank's sizes are symbolic.
        exchangeable: all came, and one of them may call several functions, or graphs of this one, here.
        as_before: all came with what they had sent before, this rank before the last one.
    """

    symbolic: bool
    exchangeable: bool
    as_before: bool


@dataclasses.dataclass(frozen=True)
class Offer:
    """What a rank brings to the gate.

    Attributes:
        rank: the rank of the process.
        what: the graph, in words.
        function: the function it was compiled from, as named on every rank.
        inputs: digest of the Dynamo graph's input names. If they differ, collectives carry other values.
        calls: what the graph sends, as passed to the compiler.
        lowered: the same after the compiler's passes, if known.
        sizes: sizes of inputs that are symbolic and decide what is sent.
        functions: all functions of this rank that have sent the same.
        graphs: the graphs of this function that this rank has compared (:attr:`graph`).
        has_others: whether this rank has compared something else that this function sends.
    """

    rank: int
    what: str
    function: str
    inputs: str
    calls: Signature
    lowered: Signature | None
    sizes: Mapping[str, int]
    functions: Sequence[str] = ()
    graphs: Sequence[str] = ()
    has_others: bool = False

    @functools.cached_property
    def graph(self) -> str:
        """Identifies a function's graph for any sizes: the collectives, and what each is computed from."""
        told = [(call.operator, call.arguments, call.source) for call in self.calls]
        return hashlib.sha256(repr(told).encode()).hexdigest()[:16]

    @functools.cached_property
    def digests(self) -> tuple[str, str]:
        """Digests of what is sent, as passed to the compiler and after its passes (``""`` if unknown)."""
        left = self.lowered and [dataclasses.replace(call, computed="") for call in self.lowered]
        return _digest(self.calls), "" if left is None else _digest(left)

    @functools.cached_property
    def sent(self) -> str:
        """Identifies operators and sizes: what must be equal if the carried values were compared before."""
        return "sent " + _digest(tuple(call.of_other_inputs() for call in self.calls))

    def fits_one_of(self, accepted: Mapping[str, str]) -> bool:
        """Whether the same was accepted before, by digests."""
        given, left = self.digests
        return given in accepted and (not left or accepted[given] in ("", left))

    def sends(self) -> str:
        """Describe its first collectives, for people."""
        shown = "; ".join(map(str, self.calls[:_SHOWN])) + (", ..." if len(self.calls) > _SHOWN else "")
        return f"whose collectives are {len(self.calls)}: {shown}"

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> Offer:
        found = json.loads(text)
        for key in ("calls", "lowered"):
            if found[key] is not None:
                found[key] = tuple(
                    CollectiveCall(**{**call, "operands": tuple(call["operands"])}) for call in found[key]
                )
        return cls(**found)


@dataclasses.dataclass(frozen=True)
class _Difference:
    """How two signatures differ.

    Attributes:
        text: in words.
        factor: the size that makes the difference, if it has a name on both ranks; else which collective.
        values: its value on both.
        by_size: whether that is a size.
    """

    text: str
    factor: str
    values: tuple[str, ...]
    by_size: bool = False


def what_differs(theirs: Offer, own: Offer) -> str:
    """Describe why what another rank sends does not fit this one's; ``""`` if it does. Args: both."""
    found = _difference(theirs, own)
    return "" if found is None else found.text


def _difference(first: Offer, own: Offer) -> _Difference | None:
    """Return how two signatures differ, or None if they fit."""
    pairs = ((first.calls, own.calls, ""), (first.lowered, own.lowered, " after the compiler's own passes"))
    for a, b, when in pairs:
        if a is None or b is None:
            continue
        if first.inputs != own.inputs:  # one rank broke its graph elsewhere
            a, b = (tuple(call.of_other_inputs() for call in calls) for calls in (a, b))
        number = first_difference(a, b)
        if number is not None:
            theirs, ours = (str(calls[number]) if number < len(calls) else "none" for calls in (a, b))
            text = (
                f"Their collectives{when}: {len(a)} in the {first.what} on rank {first.rank}, {len(b)} in the {own.what} on "
                f"rank {own.rank}; number {number} is {theirs} on rank {first.rank} and {ours} on rank {own.rank}."
            )
            for name, size in first.sizes.items():
                if own.sizes.get(name, size) != size:
                    text += f" What differs first: {name} is {size} on rank {first.rank} and {own.sizes[name]} on rank {own.rank}."
                    return _Difference(text, name, (str(size), str(own.sizes[name])), by_size=True)
            return _Difference(text, f"collective {number}{when}", (theirs, ours))
    # If each rank knows both graphs, they are called in another order.
    if first.graph in own.graphs and own.graph in first.graphs:
        for a_call, b_call in zip(first.calls, own.calls, strict=True):
            # A value computed from nothing is, for example, zeros, which fit any sum.
            if a_call.source and b_call.source and a_call.source != b_call.source:
                text = (
                    f"They fit, but the ranks call the graphs of one function ({own.function}) in another order: the {first.what} on rank {first.rank} has "
                    f"{a_call}, the {own.what} on rank {own.rank} {b_call}. Look for what the function branches on."
                )
                return _Difference(text, "order of calls", (str(a_call), str(b_call)), by_size=True)
    known = (first.function in own.functions) + (own.function in first.functions)
    # If inputs differ, one rank may have broken its graph, and the other rank does not have its function.
    if first.function != own.function and known > (first.inputs != own.inputs):
        text = (
            f"They fit, but the ranks call the functions that send them in another order: here the {first.what} ({first.function}) on rank "
            f"{first.rank}, the {own.what} ({own.function}) on rank {own.rank}, {own.sends()}."
        )
        return _Difference(text, "order of calls", (first.function, own.function), by_size=True)
    return None


def _digest(signature: Sequence[CollectiveCall]) -> str:
    return hashlib.sha256(repr(signature).encode()).hexdigest()


def _error_json(problem: str, ranks: Sequence[int], factor: str, values: Sequence[str]) -> str:
    """Serialize an error for the store."""
    return json.dumps({"problem": problem, "ranks": ranks, "factor": factor, "values": values})
