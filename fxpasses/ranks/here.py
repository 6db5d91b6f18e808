"""This rank's state, and the thread that reports it even if the rank builds, waits, compiles or hangs.

The thread starts with the job's process group, before anything is compiled. Otherwise a rank that is inside
eager collectives would look like a slow one. This module imports nothing that ``import fxpasses`` does not
need, and uses torch as the main thread imported it, because imports of two threads may interleave.
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
"""Seconds that an exiting process waits for the thread that answers."""
_PAUSE = 0.05
"""Seconds between two checks for the job's process group."""


@dataclasses.dataclass
class Here:
    """The state of this rank, for ranks that ask.

    Attributes:
        lock: held while decisions and calls are counted.
        rounds: number of decisions so far, by code.
        accepted: what was compared and fits, as digests, by group and code.
        functions: functions that were compared, by group and what they send.
        graphs: graphs that were compared, by group and code, regardless of sizes.
        exchangeable: group and what several functions send on all ranks, or code that sends several things.
            Each such call is compared.
        varying: group and code for which each call compares symbolic sizes, if they have had several values.
        compared: by group, the number of the last compared call, and what this rank deletes of it in the
            store.
        decided: what is saved, by the structure of the joint graph.
        running: the compiled graph with collectives that this rank is inside.
        since: when it entered that graph.
        inside: the process groups in which that graph communicates: their name on all ranks, their ranks, and
            the number of the call.
        calls: the number of calls of such graphs, by group.
        sent: what the last of them sent (an object with ``to_json``), by group and number.
        comes: the number of the last compared call, by group.
        answering: the thread that answers.
        waits: where the rank compares what it compiled: group, ranks and number of the comparison, and what
            it sends; None elsewhere.
        exiting: set when the process exits.
        exit_callbacks: what the process waits for on exit.
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
    exiting: threading.Event = dataclasses.field(default_factory=threading.Event)
    exit_callbacks: list[Callable[[], None]] = dataclasses.field(default_factory=list)

    def forget(self) -> None:
        """Forget all comparisons: ``torch._dynamo.reset()`` gives the same numbers to other code."""
        for known in (self.accepted, self.functions, self.graphs, self.exchangeable, self.varying):
            known.clear()  # type: ignore[attr-defined]

    def begin(self, key: str, sends: Any, comes: bool) -> int:
        """Count a call, and return its number.

        Args:
            key: the key of the group.
            sends: what the call sends there.
            comes: whether the call is compared, so that nobody has to ask.

        Returns:
            The number.
        """
        with self.lock:
            number = self.calls[key]
            self.calls[key] += 1
            if comes:
                self.comes[key] = number  # before others can be told that the call has begun
            self.sent[key, number] = sends
            self.sent.pop((key, number - _REMEMBERED), None)
            return number

    def state(self, key: str = "", number: int = 0) -> dict[str, Any]:
        """Return the state to report.

        That is what runs and communicates (or ``""``), its seconds, calls per group, and where it waits.

        ``eager`` is the collective outside of compared graphs that the rank is inside, ``sent`` what one call
        sent, if it has begun, and ``comes`` whether that call is compared.

        Args:
            key: the key of the group in question.
            number: the number of the call.
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
"""Calls per group that are kept, as far as ranks can be apart: graphs may end before their sends do."""


def _eager_collective() -> str:
    """Return the collective (function or operator) that the main thread is in, and its caller; or ``""``."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    name = ""
    known = sys.modules.get("fake.dispatch.communication")  # imported once the rank has compiled something
    communicates = known.communicates if known is not None else lambda called: "c10d" in str(called)
    while frame is not None and frame.f_code.co_filename.endswith("torch/_ops.py"):
        called = frame.f_locals.get("self")
        if communicates(called):
            name = str(called)
        frame = frame.f_back
    while frame is not None and _is_library_file(frame.f_code.co_filename.replace("\\", "/")):
        if "/torch/distributed/" in frame.f_code.co_filename.replace("\\", "/"):
            own = frame.f_code.co_name
            # Each function of torch.distributed has a wrapper.
            says_nothing = own.startswith("__") or own == "wrapper"
            name = (name or "a collective") if says_nothing else own
        elif not name:
            return ""
        frame = frame.f_back
    if frame is None or not name:
        return name
    return f"{name}, called in {frame.f_code.co_filename}:{frame.f_lineno}, {frame.f_code.co_name}"


def _is_library_file(file: str) -> bool:
    return "/torch/" in file or file.startswith(_OWN)


_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))).replace("\\", "/") + "/"

HERE = Here()


def job_store() -> Any:
    """Return the rendezvous store: a ``Store`` with ``clone`` and ``timeout``, missing in its stub.

    Torch has no public name for it, and a seam file would import torch.
    """
    return sys.modules["torch.distributed.distributed_c10d"]._get_default_store()


def ensure_answering() -> None:
    """Start answering other ranks, unless this rank already does."""
    with HERE.lock:
        if HERE.answering is None:
            HERE.answering = _start(sys.modules["torch.distributed"].get_rank())


def _start(rank: int) -> threading.Thread | None:
    """Start the thread that answers; none if a second thread cannot wait on the store."""
    try:
        store = job_store().clone()
        store.set(process_key(rank), json.dumps(dataclasses.astuple(Process.own())))
    except RuntimeError as error:
        log.info("this rank does not answer other ranks: %s", error)
        return None
    thread = threading.Thread(target=_answer, args=(store, rank), name="fxpasses ranks", daemon=True)
    thread.start()
    HERE.exit_callbacks.append(functools.partial(_end, thread, store.clone(), rank))
    return thread


@atexit.register
def _leave() -> None:
    """Let the threads finish: Python ends those that return from C++ at exit, and C++ then aborts."""
    HERE.exiting.set()
    for callback in HERE.exit_callbacks:  # first the thread that waits for a group, as it may start to answer
        callback()


def _end(thread: threading.Thread, store: Any, rank: int) -> None:
    """Wake the thread up for the last time."""
    try:
        store.set(exit_key(rank), "")
        post_question(store, rank)
    except RuntimeError as error:  # the store is gone, and the thread soon will be
        log.debug("the store cannot be reached any more: %s", error)
    thread.join(LEAVING_SECONDS)


def post_question(store: Any, rank: int, key: str = "", call: int = 0) -> int:
    """Ask a rank a question, and return the question's number.

    Args:
        store: the job's store.
        rank: the rank to ask.
        key: the key of the group in question.
        call: the number of the call in question.
    """
    number: int = store.add(f"fxpasses/asked/{rank}", 1)
    store.set(f"fxpasses/ask/{rank}/{number}", json.dumps([key, call]))
    return number


def _answer(store: Any, rank: int) -> None:
    number = 1
    while not HERE.exiting.is_set():
        try:
            store.wait([f"fxpasses/ask/{rank}/{number}"], datetime.timedelta(days=7))
            state = HERE.state(*json.loads(store.get(f"fxpasses/ask/{rank}/{number}")))
            store.set(f"fxpasses/answer/{rank}/{number}", json.dumps(state))
        except RuntimeError:
            return  # the store is gone, so the job is too
        number += 1


def exit_key(rank: int) -> str:
    """Return the key that a rank sets in the store when its process exits."""
    return f"fxpasses/left/{rank}"


def process_key(rank: int) -> str:
    """Return the key under which a rank's process identifies itself in the store."""
    return f"fxpasses/process/{rank}"


def answer_once_initialized() -> None:
    """Start a thread that waits for the process group of a ``torchrun`` job; single processes need none."""
    if os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ:
        thread = threading.Thread(
            target=_wait_for_group, name="fxpasses waits for a process group", daemon=True
        )
        thread.start()
        HERE.exit_callbacks.insert(0, functools.partial(thread.join, LEAVING_SECONDS))


def _wait_for_group() -> None:
    while not HERE.exiting.is_set():
        if (distributed := _initialized_distributed()) is not None:
            if distributed.get_backend() != "fake":
                ensure_answering()
            return
        HERE.exiting.wait(_PAUSE)
    distributed = (
        _initialized_distributed()
    )  # exits right after its first group began: tell the others, as it does not answer
    if distributed is not None and distributed.get_backend() != "fake" and HERE.answering is None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            job_store().set(exit_key(distributed.get_rank()), "")


def _initialized_distributed() -> Any:
    """Return ``torch.distributed`` if this process is in a group."""
    distributed = sys.modules.get("torch.distributed")
    return distributed if distributed is not None and getattr(distributed, "is_initialized", bool)() else None


answer_once_initialized()
