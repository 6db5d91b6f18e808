"""Run a repro file that a check has written."""

from __future__ import annotations

import contextlib
import io
import runpy
from pathlib import Path

import torch

from tests import children


def in_a_new_process(file: str | Path) -> tuple[int, str, str]:
    """Exit status, output and errors of the file as a user runs it."""
    done = children.run(file, cwd=Path(file).resolve().parent)
    return done.returncode, done.stdout, done.stderr


def in_this_process(file: str | Path) -> tuple[int, str, str]:
    """The same as a program of its own in this process: for tests of what the file shows, not of how it starts."""
    torch._dynamo.reset()
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            runpy.run_path(str(file), run_name="__main__")
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
    return status, output.getvalue(), errors.getvalue()
