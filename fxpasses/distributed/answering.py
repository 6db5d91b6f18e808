"""What this rank does now, and the thread that tells it to ranks that ask, while the rank itself waits, compiles or hangs."""

from __future__ import annotations

import atexit
import dataclasses
import datetime
import json
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from fxpasses._torch import OpOverload, OpOverloadPacket
from fxpasses.distributed import _torch
from fxpasses.errors import RankMismatchError
from fxpasses.graphs.communication import communicates

log = logging.getLogger(__name__)

ASK_AFTER = 1.0
"""Seconds after which the first rank at the gate asks who is missing."""
STUCK_AFTER = 2.0
"""Seconds inside of another graph with collectives after which a rank will not come."""
SILENT_AFTER = float(os.environ.get("FXPASSES_SILENT_AFTER", "60"))
"""Seconds without an answer after which a rank counts as gone (half of the store's timeout, where that is less)."""
_LEAVING_SECONDS = 5.0
"""Seconds that a process waits at its end for the thread that answers."""


@dataclasses.dataclass
class Here:
    """What this rank does now, for ranks that ask.

    Attributes:
        lock: held while decisions and calls are counted.
        rounds: decisions so far, by code.
        accepted: what was compared and fits, as digests, by group and code.
        functions: those that were compared, by group and what they send.
        exchangeable: group and what is sent by several functions on all ranks: each call is compared.
        varying: group and code whose symbolic sizes each call compares, if they have had several values.
        compared: by group, the number of the last call that was compared, and what this rank deletes of it at the store.
        decided: what is saved, by the structure of the joint graph.
        running: the compiled graph with collectives that it is inside of.
        since: when it went there.
        calls: of such graphs, by group.
        sent: what the last of them sent (an object with ``to_json``), by group and number.
        answering: the thread that answers.
        waits: where it compares what it compiled: group, ranks and number of the comparison, and what it sends; None elsewhere.
        leaves: whether the process ends.
    """

    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    rounds: dict[str, int] = dataclasses.field(default_factory=dict)
    accepted: dict[tuple[str, str], dict[str, str]] = dataclasses.field(default_factory=dict)
    functions: dict[tuple[str, str], set[str]] = dataclasses.field(default_factory=dict)
    exchangeable: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    varying: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    compared: dict[str, tuple[int, tuple[str, ...]]] = dataclasses.field(default_factory=dict)
    decided: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    running: str = ""
    since: float = 0.0
    calls: Counter[str] = dataclasses.field(default_factory=Counter)
    sent: dict[tuple[str, int], Any] = dataclasses.field(default_factory=dict)
    answering: Any = None
    waits: dict[str, Any] | None = None
    leaves: bool = False

    def forget(self) -> None:
        """Compare again what was compared: ``torch._dynamo.reset()`` gives other code the same numbers."""
        for known in (self.accepted, self.functions, self.exchangeable, self.varying):
            known.clear()  # type: ignore[attr-defined]

    def begin(self, key: str, sends: Any) -> int:
        """Count a call; gives its number.

        Args:
            key: of the group.
            sends: what it sends there.
        """
        with self.lock:
            number = self.calls[key]
            self.calls[key] += 1
            self.sent[key, number] = sends
            self.sent.pop((key, number - _REMEMBERED), None)
            return number

    def state(self, key: str = "", number: int = 0) -> dict[str, Any]:
        """As it is told: what runs (``""`` if nothing does that communicates), for how many seconds, how many calls each group has seen, where it waits.

        ``eager`` is the collective outside of compared graphs that it is inside of, ``sent`` what one call sent, if it was begun.

        Args:
            key: of the group that the question is about.
            number: of the call.
        """
        sent = self.sent.get((key, number))
        return {
            "running": self.running,
            "seconds": time.monotonic() - self.since if self.running else 0.0,
            "calls": dict(self.calls),
            "waits": self.waits,
            "eager": "" if self.running else _eager_collective(),
            "sent": "" if sent is None else sent.to_json(),
        }


_REMEMBERED = 256
"""Calls of a group whose collectives are known: how far ranks can be apart, as graphs may end without waiting for what they send."""


def _eager_collective() -> str:
    """The function of ``torch.distributed``, or the operator, that the main thread is inside of, and who called it; ``""`` elsewhere."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    name = ""
    while frame is not None and frame.f_code.co_filename.endswith("torch/_ops.py"):
        called = frame.f_locals.get("self")
        if isinstance(called, OpOverload | OpOverloadPacket) and communicates(called):
            name = str(called)
        frame = frame.f_back
    while frame is not None and "/torch/" in frame.f_code.co_filename.replace("\\", "/"):
        if "/torch/distributed/" in frame.f_code.co_filename.replace("\\", "/"):
            own = frame.f_code.co_name
            name = own if not own.startswith("__") else name or "a collective"
        elif not name:
            return ""
        frame = frame.f_back
    if frame is None or not name:
        return name
    return f"{name}, called in {frame.f_code.co_filename}:{frame.f_lineno}, {frame.f_code.co_name}"


HERE = Here()


class Answering:
    """The thread of a rank that answers what it is asked, while the rank itself waits, compiles or hangs."""

    @staticmethod
    def ensure() -> None:
        """Answer from now on, if this rank does not yet."""
        _torch.store().check(
            ["fxpasses"]
        )  # fails at once where the store is gone; another connection is tried for minutes
        with HERE.lock:
            if HERE.answering is None:
                HERE.answering = Answering._start(dist.get_rank())

    @staticmethod
    def introduce() -> None:
        """Answer from now on, if this one of several processes can talk: those that compile may ask before this one does."""
        if len(_torch.ranks_of(None)) < 2:
            return
        with reaching_store("tell the other ranks that it is here"):
            Answering.ensure()

    @staticmethod
    def _start(rank: int) -> threading.Thread | None:
        """Begin to answer; where the store cannot be waited at from a second thread, nobody answers."""
        try:
            store = _torch.store().clone()
        except RuntimeError as error:
            log.info("this rank does not answer other ranks: %s", error)
            return None
        thread = threading.Thread(
            target=Answering._answer, args=(store, rank), name="fxpasses ranks", daemon=True
        )
        thread.start()
        # Python ends threads where they come back from C++, which then ends the process with a signal.
        atexit.register(Answering._end, thread, store.clone(), rank)
        return thread

    @staticmethod
    def _end(thread: threading.Thread, store: _torch.Store, rank: int) -> None:
        """Wake the thread up, for the last time."""
        HERE.leaves = True
        try:
            store.set(_left(rank), "")
            Answering._pose(store, rank)
        except (RuntimeError, dist.DistError) as error:  # the store is gone: so is the thread, soon
            log.debug("the store cannot be reached any more: %s", error)
        thread.join(_LEAVING_SECONDS)

    @staticmethod
    def _pose(store: _torch.Store, rank: int, key: str = "", call: int = 0) -> int:
        """Put a question to a rank; gives its number."""
        number = store.add(f"fxpasses/asked/{rank}", 1)
        store.set(f"fxpasses/ask/{rank}/{number}", json.dumps([key, call]))
        return number

    @staticmethod
    def _answer(store: _torch.Store, rank: int) -> None:
        number = 1
        while not HERE.leaves:
            try:
                store.wait([f"fxpasses/ask/{rank}/{number}"], datetime.timedelta(days=7))
                state = HERE.state(*json.loads(store.get(f"fxpasses/ask/{rank}/{number}")))
                store.set(f"fxpasses/answer/{rank}/{number}", json.dumps(state))
            except (RuntimeError, dist.DistError):
                return  # the store is gone: so is the job
            number += 1

    @staticmethod
    def has_left(rank: int) -> bool:
        """Whether the process of a rank has come to its end. One that was killed has not said so."""
        return bool(_torch.store().check([_left(rank)]))

    @staticmethod
    def ask(rank: int, key: str = "", call: int = 0) -> dict[str, Any] | None:
        """What a rank does now, or ``None`` if it does not say so within a second.

        Args:
            rank: the rank.
            key: of the group that the question is about.
            call: the number of the call that it is about.
        """
        store = _torch.store()
        number = Answering._pose(store, rank, key, call)
        if not came(store, f"fxpasses/answer/{rank}/{number}", ASK_AFTER):
            return None
        return json.loads(store.get(f"fxpasses/answer/{rank}/{number}"))


def _left(rank: int) -> str:
    return f"fxpasses/left/{rank}"


def came(store: _torch.Store, key: str, seconds: float) -> bool:
    """Whether a key is at the store within some time. (A wait with a short timeout would be logged as a failure of the network.)

    Args:
        store: of the group's processes.
        key: the key.
        seconds: the time.
    """
    end, pause = time.monotonic() + seconds, 0.0001
    while not store.check([key]):
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return True


@contextmanager
def reaching_store(purpose: str) -> Iterator[None]:
    """Within, the job's store is asked; where it cannot be reached any more, the error says what that means.

    Args:
        purpose: what this rank wants of it.

    Raises:
        RankMismatchError: the process that keeps the store has ended.
    """
    try:
        yield
    except dist.DistError as error:
        raise RankMismatchError(
            f"rank {dist.get_rank()} wants to {purpose}, and the job's key-value store cannot be reached any more: the process that keeps it "
            f"(rank 0, unless torchrun does) has ended or hangs ({str(error).splitlines()[0]})",
            (),
        ) from error


_MOST_ASKED = 8


def note_absent_ranks(error: RuntimeError, key: str, ranks: Sequence[int]) -> None:
    """Add notes to an error that a graph with collectives ended with: which other ranks have ended, hang, or are elsewhere.

    Args:
        error: as the communication library raised it, which knows no ranks.
        key: of the process group, as calls are counted.
        ranks: of the group; those with the nearest numbers are asked, which are the neighbours in a ring.
    """
    if not dist.is_initialized():
        return
    own = dist.get_rank()
    for rank in sorted((rank for rank in ranks if rank != own), key=lambda rank: abs(rank - own))[
        :_MOST_ASKED
    ]:
        try:
            state = Answering.ask(rank)
        except dist.DistError:
            error.add_note(
                "The job's key-value store is gone: the process that keeps it (rank 0, unless torchrun does) has ended."
            )
            return
        if state is None:
            error.add_note(f"Rank {rank} does not answer: it has ended or hangs.")
        elif (calls := state["calls"].get(key, 0)) != HERE.calls[key]:
            where = f"inside of the {state['running']}" if state["running"] else "outside of all of them"
            error.add_note(
                f"Rank {rank} has begun {calls} compiled graphs with collectives of this group, rank {own} {HERE.calls[key]}; it is {where}."
            )
