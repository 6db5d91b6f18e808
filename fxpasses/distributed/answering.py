"""Questions to other ranks, which a thread on each answers (:mod:`fxpasses.ranks.here`)."""

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
    """Return the value of an environment variable. Raises OptionsError if it is not a number of seconds."""
    given = os.environ.get(variable, "")
    try:
        seconds = float(given or default)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise OptionsError(variable, given, "a number of seconds above 0")
    return seconds


ASK_AFTER = 1.0
"""Seconds after which the first rank at the gate asks which ranks are missing."""
STUCK_AFTER = 2.0
"""Seconds inside another graph with collectives after which a rank is assumed not to come."""
SILENT_AFTER = _seconds("FXPASSES_SILENT_AFTER", 60.0)
"""Seconds without an answer until a rank is assumed gone (half of the store's timeout, if that is less)."""


class Answering:
    """A rank's thread that answers questions while the rank itself waits, compiles or hangs."""

    @staticmethod
    def ensure() -> None:
        """Start answering, unless this rank already does."""
        job_store().check(
            ["fxpasses"]
        )  # fails at once if the store is gone, whereas a new connection is retried for minutes
        here.ensure_answering()

    @staticmethod
    def introduce() -> None:
        """Start answering if there are several processes: those that compile may ask before this one does."""
        if len(ranks_of(None)) < 2:
            return
        with reaching_store("tell the other ranks that it is here"):
            Answering.ensure()

    @staticmethod
    def end_of(rank: int) -> str:
        """Return how a rank's process ended: it exited, or was killed on this machine; else ``""``."""
        store, key = job_store(), here.process_key(rank)
        if store.check([here.exit_key(rank)]):
            return "has ended"
        killed = store.check([key]) and Process(*json.loads(store.get(key))).has_ended()
        return "was killed, or crashed" if killed else ""

    @staticmethod
    def ask(rank: int, key: str = "", call: int = 0) -> dict[str, Any] | None:
        """Return the state of a rank, or ``None`` if it does not answer within a second.

        Args:
            rank: the rank.
            key: the key of the group in question.
            call: the number of the call in question.
        """
        store = job_store()
        number = here.post_question(store, rank, key, call)
        if not wait_for_key(store, f"fxpasses/answer/{rank}/{number}", ASK_AFTER):
            return None
        return json.loads(store.get(f"fxpasses/answer/{rank}/{number}"))


def wait_for_key(store: dist.Store, key: str, seconds: float) -> bool:
    """Whether a key appears in the store within ``seconds``.

    A wait with a short timeout would be logged as a network failure.

    Args:
        store: the store of the group's processes.
        key: the key.
        seconds: the time limit.
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
    """Use the job's store inside. If it cannot be reached any more, the error says what that means.

    Args:
        purpose: what this rank needs it for.

    Raises:
        RankMismatchError: if the process that hosts the store has ended.
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
    """Add notes to an error of a graph with collectives: which other ranks ended, hang, or are elsewhere.

    Args:
        error: the error of the communication library, which knows no ranks.
        key: the key of the process group, as used to count calls.
        ranks: the ranks of the group. Those with the nearest numbers are asked: the neighbors in a ring.
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
