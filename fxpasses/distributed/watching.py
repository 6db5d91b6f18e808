"""Detect calls that hang: ranks that run what was compared before in another order wait for each other.

On each rank, a thread watches compiled graphs with collectives that have run for some seconds. It asks the
next rank of the group what that rank sent in the same call. If that rank waits there too, and the two do not
fit, neither call can end. Nor can a call that no other rank of the job has begun while all of them are inside
eager collectives. A thread cannot raise in another one that waits inside the communication library. So the
process reports the reason and exits, as after NCCL's watchdog finds a collective that does not end.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import time

import torch.distributed as dist

from fxpasses.distributed.answering import STUCK_AFTER, Answering
from fxpasses.distributed.gate import EagerCollectives, Offer, what_differs
from fxpasses.ranks.here import HERE, LEAVING_SECONDS, exit_key, job_store

log = logging.getLogger(__name__)

EXIT_CODE = 13
"""The exit code of a process that ends itself."""
_CHECK_SECONDS, _MAX_ASK_SECONDS = 0.5, 64.0
"""Seconds between two checks of what runs, and maximum seconds between two questions about one call."""
_EAGER_STUCK_SECONDS, _MOST_ASKED = 15.0, 8
"""Seconds that all others must be at the same line, and the maximum number of others to ask."""
_GRACE = 2.0
"""Seconds in which the library may still end the call with its own error."""


class Watch:
    """The thread that watches the calls of this rank."""

    _lock = threading.Lock()
    _thread: threading.Thread | None = None

    @classmethod
    def ensure(cls) -> None:
        """Start watching calls, unless a thread already does."""
        with cls._lock:
            if cls._thread is None or not cls._thread.is_alive():
                cls._thread = threading.Thread(target=_watch, name="fxpasses watches calls", daemon=True)
                cls._thread.start()
                HERE.exit_callbacks.append(functools.partial(cls._thread.join, LEAVING_SECONDS))


def _watch() -> None:
    asked, pause, logged, looked_at = 0.0, STUCK_AFTER, "", 0.0
    eager = EagerCollectives(True, _EAGER_STUCK_SECONDS)
    while not HERE.exiting.wait(_CHECK_SECONDS):
        since, inside = HERE.since, HERE.inside
        if not HERE.running or time.monotonic() - since < STUCK_AFTER:
            asked, pause = 0.0, STUCK_AFTER
            continue
        if time.monotonic() - asked < pause:
            continue
        asked, pause = time.monotonic(), min(2 * pause, _MAX_ASK_SECONDS)
        if since != looked_at:
            eager, looked_at = EagerCollectives(True, _EAGER_STUCK_SECONDS), since
        try:
            why = _mismatch_reason(inside) or _absence_reason(inside, eager)
        except (dist.DistError, RuntimeError):
            return  # the store is gone, and the job soon will be
        if why and why != logged and HERE.running and HERE.since == since:
            logged = why
            log.error("%s", why)
            if not HERE.exiting.wait(_GRACE) and HERE.running and HERE.since == since:
                _exit_process(why)


def _mismatch_reason(inside: tuple[tuple[str, tuple[int, ...], int], ...]) -> str:
    """Describe why a call hangs: the next rank of a group waits in it, too, and does not fit; else ``""``."""
    own = dist.get_rank()
    for key, ranks, number in inside:
        offer = HERE.sent.get((key, number))
        other = ranks[(ranks.index(own) + 1) % len(ranks)]
        state = Answering.ask(other, key, number)
        if offer is None or state is None or not state["sent"]:
            continue
        # A rank that is elsewhere, or in a later call, does not wait in this one. Its eager collectives are
        # not counted.
        if state["seconds"] < STUCK_AFTER or state["calls"].get(key) != number + 1:
            continue
        text = what_differs(Offer.from_json(state["sent"]), offer)
        if text:
            return (
                f"rank {own} and rank {other} are inside of collectives that do not fit together, and neither comes back. {text} Both have compared them "
                "before, and call them in another order: look for a call that one of them leaves out (a backward pass, say), or makes once more."
            )
    return ""


def _absence_reason(inside: tuple[tuple[str, tuple[int, ...], int], ...], eager: EagerCollectives) -> str:
    """Describe where the others are, if none began a call and all stay in eager collectives; else ``""``.

    Args:
        inside: the groups, their ranks, and the number of the call that this rank is inside.
        eager: how long they have been there.
    """
    own = dist.get_rank()
    for key, ranks, number in inside:
        others = [rank for rank in ranks if rank != own]
        if len(ranks) != dist.get_world_size() or len(others) > _MOST_ASKED:
            continue
        for rank in others:
            state = Answering.ask(rank, key, number)
            if state is None or state["sent"] or not state["eager"]:
                break
            if where := eager.of_all(others, rank, state["eager"]):
                return (
                    f"rank {own} is inside of the {HERE.running}, which no other rank has begun: rank {rank} is inside of {where}, which is not compiled there. "
                    "Both have compared what they call: look for a call that one of them leaves out, or makes once more."
                )
    return ""


def _exit_process(why: str) -> None:
    sys.stderr.write(f"RankMismatchError: {why}\n")
    sys.stderr.flush()
    job_store().set(exit_key(dist.get_rank()), "")
    os._exit(EXIT_CODE)
