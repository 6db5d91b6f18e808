"""Run work in a forked process: kernels may crash on inputs that they should refuse."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from fake.error_text import describe_error

T = TypeVar("T")


@dataclass(frozen=True)
class Crash:
    """A step that ended its process, or did not finish.

    Attributes:
        step: its number.
        reason: what happened to the process.
    """

    step: int
    reason: str


def can_isolate() -> bool:
    """Return whether this process can be forked: not if a GPU is in use, and not in a daemon."""
    return (
        hasattr(os, "fork")
        and not multiprocessing.current_process().daemon
        and not torch.cuda.is_initialized()
    )


def run_isolated(steps: Callable[[int], Iterator[T]], *, timeout: float = 60.0) -> Iterator[T | Crash]:
    """Yield what ``steps(0)`` yields, computed in a forked process.

    Args:
        steps: ``steps(n)`` yields the results of the steps from number ``n`` on. They are pickled.
        timeout: seconds after which a step is abandoned.

    Yields:
        A result for each step, or a `Crash`, after which a new process continues with the next step.
    """
    context = multiprocessing.get_context("fork")
    step = 0
    while True:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_run_in_child, args=(steps, step, sender), daemon=True)
        with warnings.catch_warnings():
            # Python 3.12 warns about threads that may hold locks. The child runs kernels on one thread only,
            # and a kernel that waits for a lock anyway is abandoned after `timeout`.
            warnings.simplefilter("ignore", DeprecationWarning)
            child.start()
        sender.close()
        try:
            while True:
                if not receiver.poll(timeout):
                    yield Crash(step, f"gave no answer within {timeout:g} s")
                    break
                try:
                    kind, value = receiver.recv()
                except EOFError:
                    child.join()
                    yield Crash(step, _exit_reason(child.exitcode))
                    break
                if kind == "done":
                    return
                if kind == "error":
                    raise value
                yield value
                step += 1
        finally:
            receiver.close()
            child.kill()
            child.join()
        step += 1


def _run_in_child(steps: Callable[[int], Iterator[Any]], first: int, results: Connection) -> None:
    # Thread pools do not survive a fork; with one thread, none is needed.
    torch.set_num_threads(1)
    faulthandler.disable()  # a crash here is a result, not an accident to report
    try:
        for result in steps(first):
            results.send(("result", result))
        results.send(("done", None))
    except Exception as error:  # noqa: BLE001  raised again in the parent
        results.send(("error", _picklable(error)))


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001  exceptions with their own constructor arguments
        return RuntimeError(describe_error(error))
    return error


def _exit_reason(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended its process with exit code {code}"
