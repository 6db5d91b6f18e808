"""Questions to other ranks, which a thread of each answers (:mod:`fxpasses.ranks.here`)."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from fake.seam.distributed_c10d import ranks_of
from fxpasses.errors import OptionsError, RankMismatchError
from fxpasses.ranks import here
from fxpasses.ranks.here import HERE, job_store
from fxpasses.ranks.process import Process

log = logging.getLogger(__name__)


def _seconds(variable: str, default: float) -> float:
    """What an environment variable says. Raises OptionsError for what is no number of seconds."""
    given = os.environ.get(variable, "")
    try:
        seconds = float(given or default)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise OptionsError(variable, given, "a number of seconds above 0")
    return seconds


ASK_AFTER = 1.0
"""Seconds after which the first rank at the gate asks who is missing."""
STUCK_AFTER = 2.0
"""Seconds inside of another graph with collectives after which a rank will not come."""
SILENT_AFTER = _seconds("FXPASSES_SILENT_AFTER", 60.0)
"""Seconds without an answer after which a rank counts as gone (half of the store's timeout, where that is less)."""


class Answering:
    """The thread of a rank that answers what it is asked, while the rank itself waits, compiles or hangs."""

    @staticmethod
    def ensure() -> None:
        """Answer from now on, if this rank does not yet."""
        job_store().check(
            ["fxpasses"]
        )  # fails at once where the store is gone; another connection is tried for minutes
        here.answer_from_now_on()

    @staticmethod
    def introduce() -> None:
        """Answer from now on, if this one of several processes can talk: those that compile may ask before this one does."""
        if len(ranks_of(None)) < 2:
            return
        with reaching_store("tell the other ranks that it is here"):
            Answering.ensure()

    @staticmethod
    def end_of(rank: int) -> str:
        """How the process of a rank came to its end, in words: it has said so, or was killed on this machine; ``""`` if it runs, as far as is known."""
        store, key = job_store(), here.process(rank)
        if store.check([here.left(rank)]):
            return "has ended"
        killed = store.check([key]) and Process(*json.loads(store.get(key))).has_ended()
        return "was killed, or crashed" if killed else ""

    @staticmethod
    def ask(rank: int, key: str = "", call: int = 0) -> dict[str, Any] | None:
        """What a rank does now, or ``None`` if it does not say so within a second.

        Args:
            rank: the rank.
            key: of the group that the question is about.
            call: the number of the call that it is about.
        """
        store = job_store()
        number = here.pose(store, rank, key, call)
        if not came(store, f"fxpasses/answer/{rank}/{number}", ASK_AFTER):
            return None
        return json.loads(store.get(f"fxpasses/answer/{rank}/{number}"))


def came(store: dist.Store, key: str, seconds: float) -> bool:
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
            end = Answering.end_of(rank)
            state = None if end else Answering.ask(rank)
        except dist.DistError:
            error.add_note(
                "The job's key-value store is gone: the process that keeps it (rank 0, unless torchrun does) has ended."
            )
            return
        if state is None:
            error.add_note(f"Rank {rank} {end or 'does not answer: it has ended or hangs'}.")
        elif (calls := state["calls"].get(key, 0)) != HERE.calls[key]:
            where = f"inside of the {state['running']}" if state["running"] else "outside of all of them"
            error.add_note(
                f"Rank {rank} has begun {calls} compiled graphs with collectives of this group, rank {own} {HERE.calls[key]}; it is {where}."
            )
