"""Calls that do not come back: what all ranks have compared before runs without a question, and ranks that call it in another order wait for one another.

A thread of each rank looks after a compiled graph with collectives that has run for some seconds: it asks the next rank of the group what that one sent in the
same call. If it does not fit, neither call can end. A thread cannot raise in another one that waits inside of the communication library, so the process ends, after
it has said why, as one does whose NCCL watchdog finds a collective that does not end.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time

import torch.distributed as dist

from fxpasses.distributed.answering import STUCK_AFTER, Answering
from fxpasses.distributed.gate import Offer, what_differs
from fxpasses.ranks.here import HERE, job_store, left

log = logging.getLogger(__name__)

EXIT_CODE = 13
"""The exit code of a process that ends itself."""
_LOOKS_EVERY, _MOST_PATIENT = 0.5, 64.0
"""Seconds between two looks at what runs, and the most between two questions about one call."""
_GRACE = 2.0
"""Seconds in which the library may still end the call with an error of its own."""


class Watch:
    """The thread that looks after the calls of this rank."""

    _lock = threading.Lock()
    _thread: threading.Thread | None = None

    @classmethod
    def ensure(cls) -> None:
        """Look after calls from now on, if nobody does yet."""
        with cls._lock:
            if cls._thread is None or not cls._thread.is_alive():
                cls._thread = threading.Thread(target=_watch, name="fxpasses watches calls", daemon=True)
                cls._thread.start()
                HERE.at_the_end.append(cls._thread.join)


def _watch() -> None:
    asked, pause, told = 0.0, STUCK_AFTER, ""
    while not HERE.leaves.wait(_LOOKS_EVERY):
        since, inside = HERE.since, HERE.inside
        if not HERE.running or time.monotonic() - since < STUCK_AFTER:
            asked, pause = 0.0, STUCK_AFTER
            continue
        if time.monotonic() - asked < pause:
            continue
        asked, pause = time.monotonic(), min(2 * pause, _MOST_PATIENT)
        try:
            why = _why_it_hangs(inside)
        except (dist.DistError, RuntimeError):
            return  # the store is gone, and so is the job, soon
        if why and why != told and HERE.running and HERE.since == since:
            told = why
            log.error("%s", why)
            if not HERE.leaves.wait(_GRACE) and HERE.running and HERE.since == since:
                _end(why)


def _why_it_hangs(inside: tuple[tuple[str, tuple[int, ...], int], ...]) -> str:
    """What the next rank of a group sent in a call that this rank is inside of, if that does not fit; else ``""``."""
    own = dist.get_rank()
    for key, ranks, number in inside:
        offer = HERE.sent.get((key, number))
        other = ranks[(ranks.index(own) + 1) % len(ranks)]
        state = Answering.ask(other, key, number)
        if offer is None or state is None or not state["sent"]:
            continue
        text = what_differs(Offer.from_json(state["sent"]), offer)
        if text:
            return (
                f"rank {own} and rank {other} are inside of collectives that do not fit together, and neither comes back. {text} Both have compared them "
                "before, and call them in another order: look for a call that one of them leaves out (a backward pass, say), or makes once more."
            )
    return ""


def _end(why: str) -> None:
    sys.stderr.write(f"RankMismatchError: {why}\n")
    sys.stderr.flush()
    job_store().set(left(dist.get_rank()), "")
    os._exit(EXIT_CODE)
