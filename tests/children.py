"""Run programs in separate processes: forks of one process that has already imported what compiling needs.

Importing torch, Dynamo and Inductor takes longer than most of these programs. The forked process (the fork
server of ``multiprocessing``) has done nothing else: no threads, no compilation, no import of our packages. A
fork behaves like a fresh interpreter except for two things: the imported modules, and the hash seed, which is
the same in all forks. Programs that test these two, or that look for what an earlier process has stored,
start the way users start them.
"""

import atexit
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
import types
from pathlib import Path

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.lowering"])


class Child:
    """A program that runs. The arguments are those of the interpreter: a file, ``-c`` and code, or ``-m`` and a module."""

    def __init__(self, arguments, env=None, cwd=None):
        self.arguments = [str(argument) for argument in arguments]
        self._printed = tempfile.TemporaryDirectory(prefix="fxpasses_child_")
        self._files = [str(Path(self._printed.name, name)) for name in ("stdout", "stderr")]
        environment = {name: str(value) for name, value in (env or os.environ).items()}
        self._process = _forks.Process(
            target=_become, args=(self.arguments, environment, str(cwd or os.getcwd()), self._files)
        )
        self._process.start()

    def finish(self, timeout=900):
        """Wait for its end, as ``subprocess.run`` with captured output does."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.kill()
            raise subprocess.TimeoutExpired(self.arguments, timeout)
        stdout, stderr = (Path(file).read_text(errors="replace") for file in self._files)
        self._printed.cleanup()
        return subprocess.CompletedProcess(self.arguments, self._process.exitcode, stdout, stderr)

    def kill(self):
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()


def run(*arguments, env=None, cwd=None, timeout=900):
    """Run a program to its end: ``subprocess.run([sys.executable, *arguments], capture_output=True, text=True)``."""
    return Child(arguments, env, cwd).finish(timeout)


def told_by(*arguments):
    """What a program prints last, as JSON."""
    child = run(*arguments)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


def run_fresh(*arguments, env=None, cwd=None, timeout=900):
    """The same in an interpreter that has imported nothing."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command, env=env, cwd=cwd, timeout=timeout, capture_output=True, text=True, check=False
    )


def _become(arguments, environment, folder, files):
    """In the fork: be the interpreter that was started with these arguments."""
    for descriptor, file in zip((1, 2), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    kind, *rest = arguments
    status = 0
    try:
        if kind == "-c":
            code, *rest = rest
            sys.argv, sys.path[0] = ["-c", *rest], ""
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(code, "<string>", "exec"), main.__dict__)
        elif kind == "-m":
            name, *rest = rest
            sys.argv = [name, *rest]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = [kind, *rest], str(Path(kind).resolve().parent)
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  (as an interpreter does)
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)
