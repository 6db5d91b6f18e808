"""What this rank does now, and the thread that tells it to ranks that ask, while the rank itself builds its model, waits, compiles or hangs.

The thread begins with the job's process group, before anything is compiled: a rank that stands in collectives of eager's could else not be told
from one that is slow. So nothing is imported here that ``import fxpasses`` does not need: torch is taken as the main thread imported it, for imports of two threads
meet halfway.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import functools
import json
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from fxpasses.ranks.process import Process

log = logging.getLogger(__name__)

LEAVING_SECONDS = 5.0
"""Seconds that a process waits at its end for the thread that answers."""
_PAUSE = 0.05
"""Seconds between two looks for the job's process group."""


@dataclasses.dataclass
class Here:
    """What this rank does now, for ranks that ask.

    Attributes:
        lock: held while decisions and calls are counted.
        rounds: decisions so far, by code.
        accepted: what was compared and fits, as digests, by group and code.
        functions: those that were compared, by group and what they send.
        graphs: those that were compared, by group and code, whatever their sizes.
        exchangeable: group and what is sent by several functions on all ranks, or code that sends several things: each call is compared.
        varying: group and code whose symbolic sizes each call compares, if they have had several values.
        compared: by group, the number of the last call that was compared, and what this rank deletes of it at the store.
        decided: what is saved, by the structure of the joint graph.
        running: the compiled graph with collectives that it is inside of.
        since: when it went there.
        inside: the process groups in which that communicates: what all ranks call them, their ranks, and the number of the call.
        calls: of such graphs, by group.
        sent: what the last of them sent (an object with ``to_json``), by group and number.
        comes: the number of the last one that is compared, by group.
        answering: the thread that answers.
        waits: where it compares what it compiled: group, ranks and number of the comparison, and what it sends; None elsewhere.
        leaves: set when the process ends.
        at_the_end: what the process waits for then.
    """

    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    rounds: dict[str, int] = dataclasses.field(default_factory=dict)
    accepted: dict[tuple[str, str], dict[str, str]] = dataclasses.field(default_factory=dict)
    functions: dict[tuple[str, str], set[str]] = dataclasses.field(default_factory=dict)
    graphs: dict[tuple[str, str], set[str]] = dataclasses.field(default_factory=dict)
    exchangeable: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    varying: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    compared: dict[str, tuple[int, tuple[str, ...]]] = dataclasses.field(default_factory=dict)
    decided: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    running: str = ""
    since: float = 0.0
    inside: tuple[tuple[str, tuple[int, ...], int], ...] = ()
    calls: Counter[str] = dataclasses.field(default_factory=Counter)
    sent: dict[tuple[str, int], Any] = dataclasses.field(default_factory=dict)
    comes: dict[str, int] = dataclasses.field(default_factory=dict)
    answering: Any = None
    waits: dict[str, Any] | None = None
    leaves: threading.Event = dataclasses.field(default_factory=threading.Event)
    at_the_end: list[Callable[[], None]] = dataclasses.field(default_factory=list)

    def forget(self) -> None:
        """Compare again what was compared: ``torch._dynamo.reset()`` gives other code the same numbers."""
        for known in (self.accepted, self.functions, self.graphs, self.exchangeable, self.varying):
            known.clear()  # type: ignore[attr-defined]

    def begin(self, key: str, sends: Any, comes: bool) -> int:
        """Count a call; gives its number.

        Args:
            key: of the group.
            sends: what it sends there.
            comes: whether it is compared, so that nobody has to ask.

        Returns:
            The number.
        """
        with self.lock:
            number = self.calls[key]
            self.calls[key] += 1
            if comes:
                self.comes[key] = number  # before anybody can be told that the call has begun
            self.sent[key, number] = sends
            self.sent.pop((key, number - _REMEMBERED), None)
            return number

    def state(self, key: str = "", number: int = 0) -> dict[str, Any]:
        """As it is told: what runs (``""`` if nothing does that communicates), for how many seconds, how many calls each group has seen, where it waits.

        ``eager`` is the collective outside of compared graphs that it is inside of, ``sent`` what one call sent, if it was begun, and ``comes`` whether it is compared.

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
            "comes": self.comes.get(key) == number,
        }


_REMEMBERED = 256
"""Calls of a group whose collectives are known: how far ranks can be apart, as graphs may end without waiting for what they send."""


def _eager_collective() -> str:
    """The function of ``torch.distributed``, or the operator, that the main thread is inside of, and who called it; ``""`` elsewhere."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    name = ""
    known = sys.modules.get("fake.dispatch.communication")  # of a rank that has compiled something
    communicates = known.communicates if known is not None else lambda called: "c10d" in str(called)
    while frame is not None and frame.f_code.co_filename.endswith("torch/_ops.py"):
        called = frame.f_locals.get("self")
        if communicates(called):
            name = str(called)
        frame = frame.f_back
    while frame is not None and _is_no_users(frame.f_code.co_filename.replace("\\", "/")):
        if "/torch/distributed/" in frame.f_code.co_filename.replace("\\", "/"):
            own = frame.f_code.co_name
            # A wrapper is around each function of torch.distributed.
            says_nothing = own.startswith("__") or own == "wrapper"
            name = (name or "a collective") if says_nothing else own
        elif not name:
            return ""
        frame = frame.f_back
    if frame is None or not name:
        return name
    return f"{name}, called in {frame.f_code.co_filename}:{frame.f_lineno}, {frame.f_code.co_name}"


def _is_no_users(file: str) -> bool:
    return "/torch/" in file or file.startswith(_OWN)


_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))).replace("\\", "/") + "/"

HERE = Here()


def job_store() -> Any:
    """The store through which the processes found one another: a ``Store`` with ``clone`` and ``timeout``, which its stub leaves out.

    torch has no public name for it, and a seam file would import torch.
    """
    return sys.modules["torch.distributed.distributed_c10d"]._get_default_store()


def answer_from_now_on() -> None:
    """Answer the other ranks, if this one does not yet."""
    with HERE.lock:
        if HERE.answering is None:
            HERE.answering = _start(sys.modules["torch.distributed"].get_rank())


def _start(rank: int) -> threading.Thread | None:
    """Begin to answer; where the store cannot be waited at from a second thread, nobody answers."""
    try:
        store = job_store().clone()
        store.set(process(rank), json.dumps(dataclasses.astuple(Process.own())))
    except RuntimeError as error:
        log.info("this rank does not answer other ranks: %s", error)
        return None
    thread = threading.Thread(target=_answer, args=(store, rank), name="fxpasses ranks", daemon=True)
    thread.start()
    HERE.at_the_end.append(functools.partial(_end, thread, store.clone(), rank))
    return thread


@atexit.register
def _leave() -> None:
    """Let the threads come to their end: Python ends them where they come back from C++, which then ends the process with a signal."""
    HERE.leaves.set()
    for wait in HERE.at_the_end:  # the thread that waits for a process group first: it may begin to answer
        wait()


def _end(thread: threading.Thread, store: Any, rank: int) -> None:
    """Wake the thread up, for the last time."""
    try:
        store.set(left(rank), "")
        pose(store, rank)
    except RuntimeError as error:  # the store is gone: so is the thread, soon
        log.debug("the store cannot be reached any more: %s", error)
    thread.join(LEAVING_SECONDS)


def pose(store: Any, rank: int, key: str = "", call: int = 0) -> int:
    """Put a question to a rank; gives its number.

    Args:
        store: through which the processes found one another.
        rank: who is asked.
        key: of the group that the question is about.
        call: the number of the call that it is about.
    """
    number: int = store.add(f"fxpasses/asked/{rank}", 1)
    store.set(f"fxpasses/ask/{rank}/{number}", json.dumps([key, call]))
    return number


def _answer(store: Any, rank: int) -> None:
    number = 1
    while not HERE.leaves.is_set():
        try:
            store.wait([f"fxpasses/ask/{rank}/{number}"], datetime.timedelta(days=7))
            state = HERE.state(*json.loads(store.get(f"fxpasses/ask/{rank}/{number}")))
            store.set(f"fxpasses/answer/{rank}/{number}", json.dumps(state))
        except RuntimeError:
            return  # the store is gone: so is the job
        number += 1


def left(rank: int) -> str:
    """The key that a rank leaves at the store when its process comes to its end."""
    return f"fxpasses/left/{rank}"


def process(rank: int) -> str:
    """The key under which a rank leaves at the store which process it is."""
    return f"fxpasses/process/{rank}"


def answer_from_the_first_group() -> None:
    """Wait in a thread for the process group of a job that ``torchrun`` started; a process of its own has no thread."""
    if os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ:
        thread = threading.Thread(
            target=_wait_for_group, name="fxpasses waits for a process group", daemon=True
        )
        thread.start()
        HERE.at_the_end.insert(0, functools.partial(thread.join, LEAVING_SECONDS))


def _wait_for_group() -> None:
    while not HERE.leaves.is_set():
        if (distributed := _with_group()) is not None:
            if distributed.get_backend() != "fake":
                answer_from_now_on()
            return
        HERE.leaves.wait(_PAUSE)
    distributed = (
        _with_group()
    )  # it ends right after its first group began: nobody has to ask who does not answer
    if distributed is not None and distributed.get_backend() != "fake" and HERE.answering is None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            job_store().set(left(distributed.get_rank()), "")


def _with_group() -> Any:
    """``torch.distributed``, if this process is in a group."""
    distributed = sys.modules.get("torch.distributed")
    return distributed if distributed is not None and getattr(distributed, "is_initialized", bool)() else None


answer_from_the_first_group()
