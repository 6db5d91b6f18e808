"""Ranks agree on what they compiled before they run it, or one of them is named.

The protocol, for each process group, and each compiled graph that has collectives in it: before its first call a rank counts itself in
at the job's key-value store, no collective being used. The first one leaves its signature for the others, who compare; the last one opens the gate.
That is five operations of the store a rank, whatever their number. Only where signatures differ do two ranks also leave everything that
decided their compilations, and the first difference is the reason that is given.

A rank that does not come is the harder case: it may still be compiling, or it runs something else and will never come. So each rank
has a thread that waits at the store for a question, and answers with what its rank does. The first one at the gate asks those who are missing: if one of them
is inside another compiled graph with collectives, both would wait for ever, and that is the answer.

A graph that is compiled again, with a signature that was accepted for the same code, runs without asking: ranks may recompile alone.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import fx

from fxpasses.compiling.history import Compilation, explain_miss
from fxpasses.distributed import _torch
from fxpasses.distributed.answering import (
    ASK_AFTER,
    HERE,
    SILENT_AFTER,
    STUCK_AFTER,
    Answering,
    came,
    note_absent_ranks,
    reaching_store,
)
from fxpasses.distributed.decision import decide
from fxpasses.distributed.signature import (
    CollectiveCall,
    Signature,
    first_difference,
    names_on_every_rank,
    signatures,
)
from fxpasses.errors import RankMismatchError

__all__ = ["Agreement"]


class Agreement:
    """Compares what the compiled graphs of one Dynamo graph send with what other ranks' send."""

    def __init__(self, made: Compilation, inputs: Sequence[str], code: str) -> None:
        """Take down what is compiled.

        Args:
            made: everything that decides the compilation.
            inputs: the names of the Dynamo graph's inputs, in order; ``""`` for a symbolic size, which not every rank need have.
            code: which code is compiled: the same text when it is compiled again.
        """
        self._made, self._inputs, self._code = made, inputs, code
        self._refusal: RankMismatchError | None = None

    def saved(self, joint: fx.GraphModule, names: list[str]) -> list[str]:
        """What all ranks save for the backward pass of a joint graph: what the first of them would (``ranks="agree"``).

        Args:
            joint: the joint graph.
            names: of the nodes that this rank would save.

        Where the first rank traced another graph, or does not come, the first call raises on all ranks.
        """
        groups = signatures(joint.graph, names_on_every_rank(joint.graph, self._inputs))
        try:
            with reaching_store(f"agree on what to save in {self._code}"):
                return decide(self._code, joint.graph, groups, names) if groups else names
        except RankMismatchError as error:
            self._refusal = error
            return names

    @contextmanager
    def compiling(self, kind: str, gm: fx.GraphModule) -> Iterator[Callable[[Any], Any]]:
        """Within, ``gm`` is compiled; gives the function that puts the gate before what came out.

        Args:
            kind: of the graph: forward, backward or inference.
            gm: as it is handed to the compiler.
        """
        names = names_on_every_rank(gm.graph, self._inputs)
        handed = signatures(gm.graph, names)
        lowered: list[dict[str, Signature]] = []
        if not handed:
            yield lambda compiled: compiled
            return
        with _torch.lowered_graphs(lambda graph: lowered.append(signatures(graph, names))):
            # A cache gives no graph, and several are parts of one: then Inductor's own changes are not compared.
            yield lambda compiled: self._gated(
                kind, handed, lowered[0] if len(lowered) == 1 else {}, compiled
            )

    def _gated(
        self, kind: str, handed: Mapping[str, Signature], lowered: Mapping[str, Signature], compiled: Any
    ) -> Any:
        pending = True
        what = f"{kind} graph of {self._code}"
        keys = {_key(group, ranks): ranks for group in handed if (ranks := _torch.ranks_of(group))}

        def run(inputs: Any) -> Any:
            nonlocal pending
            if self._refusal is not None:
                for group in handed:
                    _Gate.next(group, _torch.ranks_of(group)).refuse(self._refusal)
                raise self._refusal
            if pending:
                for group, calls in handed.items():
                    self._agree(group, what, calls, lowered.get(group))
                pending = False
            before, HERE.running, HERE.since = HERE.running, what, time.monotonic()
            HERE.calls.update(list(keys))
            try:
                return compiled(inputs)
            except RuntimeError as error:
                for key, ranks in keys.items():
                    note_absent_ranks(error, key, ranks)
                raise
            finally:
                HERE.running = before

        run._boxed_call = True  # type: ignore[attr-defined]
        run.called = [compiled]  # type: ignore[attr-defined]
        return run

    def _agree(self, group: str, what: str, calls: Signature, lowered: Signature | None) -> None:
        if not dist.is_initialized():
            return
        ranks = _torch.ranks_of(group)
        if len(ranks) < 2 or (group, what, lowered or calls) in HERE.accepted:
            return
        with reaching_store(f"compare the {what} with the other ranks'"):
            gate = _Gate.next(group, ranks)
            offer = _Offer(gate.rank, what, _digest(self._inputs), calls, lowered)
            HERE.waits = {
                "key": gate.key,
                "ranks": list(ranks),
                "number": gate.number,
                "sends": offer.sends(),
            }
            try:
                gate.come(offer, self._made)
            finally:
                HERE.waits = None
        HERE.accepted.add((group, what, lowered or calls))


def _key(group: str, ranks: Sequence[int]) -> str:
    """One name for a group on all of its ranks; groups of other ranks may have the same name."""
    return f"{group}/{ranks[0]}.{len(ranks)}"


def _round(key: str, number: int) -> Any:
    """The part of the store for one comparison in a group."""
    return _torch.PrefixStore(f"fxpasses/{key}/{number}", _torch.store())


class _EagerCollectives:
    """Since when ranks that do not come have been inside of collectives that are not compiled.

    If all of them are, and the others stand at the gate, nobody is left to let them go on: known only where all ranks of the job are in the group.
    """

    def __init__(self, known: bool) -> None:
        self._known = known
        self._since: dict[int, tuple[str, float]] = {}

    def of_all(self, missing: Sequence[int], rank: int, where: str) -> str:
        """Where a rank is, if all missing ones have been inside of such collectives for long enough; else ``""``."""
        if not where or self._since.get(rank, ("", 0.0))[0] != where:
            self._since[rank] = (where, time.monotonic())
        now = time.monotonic()
        stuck = all(
            (found := self._since.get(one)) is not None and found[0] and now - found[1] > STUCK_AFTER
            for one in missing
        )
        return where if self._known and stuck else ""


def _few(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")


class _Gate:
    """One round at the store, for one process group."""

    def __init__(self, group: str, ranks: Sequence[int], number: int) -> None:
        self.rank, self.ranks = dist.get_rank(), ranks
        self.key, self.number = _key(group, ranks), number
        self.store = _round(self.key, number)
        self.patience = _torch.store().timeout

    @classmethod
    def next(cls, group: str, ranks: Sequence[int]) -> _Gate:
        """The next round: each rank counts its own, and the first calls of its graphs are its rounds."""
        with HERE.lock:
            key = _key(group, ranks)
            number = HERE.rounds[key] = HERE.rounds.get(key, -1) + 1
        Answering.ensure()
        return cls(group, ranks, number)

    def come(self, offer: _Offer, made: Compilation) -> None:
        """Wait until all ranks have come with what fits; ``made`` is what decided this rank's.

        Raises:
            RankMismatchError: a rank came with something else, or does not come.
        """
        first = self.store.add("came first", 1) == 1
        if first:
            self.store.set("first", offer.to_json())
        reference = _Offer.from_json(self.store.get("first"))
        problem = _problem(reference, offer)
        if problem:
            self.store.compare_set("differs", "", str(self.rank))
        self.store.set(f"came/{self.rank}", "")
        if self.store.add("came", 1) == len(self.ranks):
            self.store.compare_set("open", "", _YES)
        if first:
            self._ask_who_is_missing(offer)
        else:
            self._wait(["open"], self.patience, offer.what)
        verdict = self.store.get("open").decode()
        if verdict != _YES:
            missing = json.loads(verdict)
            raise RankMismatchError(
                missing["problem"],
                tuple(missing["ranks"]),
                missing.get("factor", ""),
                tuple(missing.get("values", ())),
            )
        if self.store.check(["differs"]):
            self._tell(reference.rank, int(self.store.get("differs")), problem, made)

    def refuse(self, error: RankMismatchError) -> None:
        """Nobody passes: whoever comes gets this error."""
        told = {"problem": str(error), "ranks": error.ranks}
        self.store.compare_set("open", "", json.dumps(told))

    def _wait(self, keys: list[str], patience: datetime.timedelta, what: str) -> None:
        try:
            self.store.wait(keys, patience)
        except dist.DistStoreError:
            raise RankMismatchError(
                f"rank {self.rank} waited {patience} for the other ranks to compile the {what}, and nobody said why they did not",
                (self.rank,),
            ) from None

    def _ask_who_is_missing(self, offer: _Offer) -> None:
        """Wait for the last rank; meanwhile find out whether one will never come."""
        started, heard, eager = (
            time.monotonic(),
            {},
            _EagerCollectives(len(self.ranks) == dist.get_world_size()),
        )
        patience = self.patience.total_seconds()
        most_silent = min(SILENT_AFTER, patience / 2)
        while True:
            if came(self.store, "open", ASK_AFTER):
                return
            missing = self._missing(list(self.ranks))
            for rank in missing[:_ASKED_AT_ONCE]:
                if Answering.has_left(rank):
                    return self._give_up(rank, offer, f"has ended. {_DIFFERS}")
                state = Answering.ask(rank)
                if state is not None:
                    heard[rank] = time.monotonic()
                    if where := eager.of_all(missing, rank, state["eager"]):
                        return self._give_up(
                            rank, offer, f"is inside of {where}, which is not compiled there. {_DIFFERS}"
                        )
                    if self._waits_for_this(state["waits"]) and time.monotonic() - started > STUCK_AFTER:
                        return self._cross(rank, state["waits"], offer)
                    # One that is behind comes when it has caught up; one that is inside of the call that this one is about to make does not.
                    ahead = state["calls"].get(self.key, 0) > HERE.calls[self.key]
                    if state["running"] and ahead and state["seconds"] > STUCK_AFTER:
                        why = f"has been inside of the {state['running']} for {state['seconds']:.0f} s, which it need not compile again"
                        return self._give_up(rank, offer, f"{why}. {_DIFFERS}")
                elif (silent := time.monotonic() - heard.get(rank, started)) > most_silent:
                    return self._give_up(
                        rank,
                        offer,
                        f"has not answered for {silent:.0f} s: it has ended, hangs, or has compiled nothing yet",
                    )
            if missing and time.monotonic() - started > patience:
                return self._give_up(missing[0], offer, f"was waited for during {self.patience}. {_DIFFERS}")

    def _waits_for_this(self, waits: dict[str, Any] | None) -> bool:
        """Whether a rank that is to come here waits in another group, for this one."""
        return (
            waits is not None
            and waits["key"] != self.key
            and self.rank in waits["ranks"]
            and HERE.rounds.get(waits["key"], -1) < waits["number"]
        )

    def _cross(self, other: int, waits: dict[str, Any], offer: _Offer) -> None:
        """Neither passes: each waits for the other in another process group."""
        groups = [
            f"{key} (ranks {_few(ranks)})"
            for key, ranks in ((self.key, self.ranks), (waits["key"], waits["ranks"]))
        ]
        problem = (
            f"rank {self.rank} and rank {other} wait for each other: the first collectives of what they compiled belong to different process groups. Rank {self.rank}: "
            f"the {offer.what} in group {groups[0]}, {offer.sends()}. Rank {other}: group {groups[1]}, {waits['sends']}. Look for what gives them other groups, or another "
            "order of them (meshes, branches on the rank)."
        )
        told = {"problem": problem, "ranks": [self.rank, other], "factor": "process group", "values": groups}
        for key, number in ((self.key, self.number), (waits["key"], waits["number"])):
            _round(key, number).compare_set("open", "", json.dumps(told))

    def _give_up(self, missing: int, offer: _Offer, why: str) -> None:
        problem = f"rank {self.rank} compiled the {offer.what}, {offer.sends()}; rank {missing} does not come: it {why}"
        self.store.compare_set("open", "", json.dumps({"problem": problem, "ranks": [missing]}))

    def _missing(self, ranks: list[int]) -> list[int]:
        """Those of some ranks that have not come: few questions where few are missing."""
        if self.store.check([f"came/{rank}" for rank in ranks]):
            return []
        if len(ranks) == 1:
            return ranks
        half = len(ranks) // 2
        return self._missing(ranks[:half]) + self._missing(ranks[half:])

    def _tell(self, first: int, other: int, problem: str, made: Compilation) -> None:
        """Raise, on every rank, with the reason that the records of the first one at the gate and of one that differs from it show.

        Args:
            first: the first one at the gate.
            other: the first that came with something else.
            problem: how this rank differs.
            made: what decided this rank's compilation.
        """
        if self.rank in (first, other):
            self.store.set(f"made/{self.rank}", made.to_json())
        if self.rank == other:
            self.store.set("problem", problem)
        records = []
        for rank in (first, other):
            self._wait([f"made/{rank}"], self.patience, "record of a compilation")
            records.append(Compilation.from_json(self.store.get(f"made/{rank}").decode()))
        differences = explain_miss(*records).differences
        message = f"rank {other} and rank {first} compiled collectives that do not fit together. "
        factor, values = "", ("", "")
        if differences:
            factor, values = differences[0].factor, (differences[0].first, differences[0].second)
            message += f"What differs first between the two compilations (rank {first} -> rank {other}): {differences[0]}. "
        raise RankMismatchError(message + self.store.get("problem").decode(), (first, other), factor, values)


_YES = "all have come"
_DIFFERS = (
    "It compiled other code, or did not have to compile again where this rank did: look for what differs between the ranks "
    "(sizes of inputs, graph breaks, branches on the rank)."
)
_ASKED_AT_ONCE = 4
_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class _Offer:
    """What a rank comes to the gate with.

    Attributes:
        rank: of the process.
        what: the graph, in words.
        inputs: stands for the names of the Dynamo graph's inputs; where they are others, collectives carry other values.
        calls: what the graph sends, as it was handed to the compiler.
        lowered: as the compiler's passes left it, if it is known.
    """

    rank: int
    what: str
    inputs: str
    calls: Signature
    lowered: Signature | None

    def sends(self) -> str:
        """Its first collectives, for people."""
        shown = "; ".join(map(str, self.calls[:_SHOWN])) + (", ..." if len(self.calls) > _SHOWN else "")
        return f"whose collectives are {len(self.calls)}: {shown}"

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> _Offer:
        found = json.loads(text)
        for key in ("calls", "lowered"):
            if found[key] is not None:
                found[key] = tuple(
                    CollectiveCall(**{**call, "operands": tuple(call["operands"])}) for call in found[key]
                )
        return cls(**found)


def _digest(names: Sequence[str]) -> str:
    return hashlib.sha256(" ".join(sorted(filter(None, names))).encode()).hexdigest()


def _problem(first: _Offer, own: _Offer) -> str:
    """How two signatures differ, in words; ``""`` if they fit."""
    pairs = ((first.calls, own.calls, ""), (first.lowered, own.lowered, " after the compiler's own passes"))
    for a, b, when in pairs:
        if a is None or b is None:
            continue
        if first.inputs != own.inputs:  # one of them broke its graph elsewhere
            a, b = (tuple(dataclasses.replace(call, carries="") for call in calls) for calls in (a, b))
        number = first_difference(a, b)
        if number is not None:
            theirs, ours = (str(calls[number]) if number < len(calls) else "none" for calls in (a, b))
            return (
                f"Their collectives{when}: {len(a)} in the {first.what} on rank {first.rank}, {len(b)} in the {own.what} on "
                f"rank {own.rank}; number {number} is {theirs} on rank {first.rank} and {ours} on rank {own.rank}."
            )
    return ""
