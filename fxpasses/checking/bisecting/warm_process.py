"""Run a script repeatedly without importing torch each time: each run is a fork of one warm process.

The warm process has imported what a compilation needs, and nothing else has happened in it: it started no
threads, touched no device, and compiled no graph. So a fork of it is equivalent to a separate process, and
starts instantly. If processes cannot be forked, each run is a separate process.

The parent and the warm process exchange lines of JSON. When the parent ends, in whatever way, so do the warm
process and the run that it has started.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

_IMPORTS = ("torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.lowering", "fxpasses")
_POLL = 0.02


class Runner:
    """Runs a script with different environments; a context manager.

    Args:
        command: the script and its arguments.
        environment: of all runs, unless a run overrides it.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command, self._environment = list(command), dict(environment)
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            assert self._server.stdin is not None
            assert self._server.stdout is not None
            self._server.stdin.close()
            self._server.wait()
            self._server.stdout.close()
            self._server = None

    def run(
        self,
        environment: Mapping[str, str],
        output: Path,
        timeout: float | None,
        command: Sequence[str] | None = None,
    ) -> tuple[int | None, str]:
        """Run the script once.

        Args:
            environment: additional variables.
            output: a file for what the script prints.
            timeout: seconds after which it is killed.
            command: another script to run, and its arguments.

        Returns:
            The exit status, ``None`` if it was killed after ``timeout`` seconds; and what it printed.
        """
        command = list(command or self._command)
        if not hasattr(os, "fork"):
            return self._run_alone(command, environment, timeout)
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-c", "from fxpasses.checking.bisecting.warm_process import serve; serve()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **self._environment},
                start_new_session=True,  # Ctrl-C is for the parent, which closes the pipe
            )
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        request = {
            "command": command,
            "environment": dict(environment),
            "output": str(output.resolve()),
            "timeout": timeout,
        }
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that runs the script ended with status {self._server.wait()}")
        return json.loads(answer)["status"], output.read_text(errors="replace")

    def _run_alone(
        self, command: Sequence[str], environment: Mapping[str, str], timeout: float | None
    ) -> tuple[int | None, str]:
        try:
            done = subprocess.run(
                [sys.executable, *command],
                env={**os.environ, **self._environment, **environment},
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None, ""
        return done.returncode, done.stdout + done.stderr


def last_exception(output: str) -> str:
    """The first line of the last exception that a script printed (200 characters at most), or "".

    >>> last_exception("Traceback (most recent call last):\\n  ...\\nValueError: no such row\\nmore about it\\n")
    'ValueError: no such row'
    """
    found = re.findall(r"^[A-Za-z_][\w.]*(?:Error|Exception|Exit)\b.*$", output, re.MULTILINE)
    return str(found[-1])[:200] if found else ""


def serve() -> None:
    """Run the warm process: answer requests on standard input until it is closed."""
    for name in _IMPORTS:
        __import__(name)
    if threading.active_count() > 1:  # a fork would lose these threads, and what they hold
        raise RuntimeError("importing torch has started a thread: scripts cannot be run in forks")
    # Output of scripts (and their workers) must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in iter(sys.stdin.readline, ""):
        status = _run_in_fork(json.loads(line))
        answers.write(json.dumps({"status": status}) + "\n")
        answers.flush()


def _run_in_fork(request: dict[str, Any]) -> int | None:
    child = os.fork()
    if not child:
        _run_script(request)
    deadline = time.monotonic() + (request["timeout"] or float("inf"))
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if _is_parent_gone():
            _kill(child)
            os._exit(1)
        if time.monotonic() > deadline:
            _kill(child)
            os.waitpid(child, 0)
            return None
        time.sleep(_POLL)


def _is_parent_gone() -> bool:
    """Whether standard input was closed: nothing is written to it while a script runs."""
    readable, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(readable)


def _kill(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # and the processes that it has started


def _run_script(request: dict[str, Any]) -> None:
    """In the fork: become the script, and exit as it does."""
    os.setpgid(0, 0)
    script, *arguments = request["command"]
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(request["environment"])
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    status = 1
    try:
        runpy.run_path(script, run_name="__main__")
        status = 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            status = end.code or 0
        else:
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  (as an interpreter does it)
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)
