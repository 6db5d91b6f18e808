"""The checks of a call in C: watched state, tensors, arguments and the state of torch.

The compiler of the kernels builds them when a plan is made, and they are part of its file. Without them (a
later Python, no compiler or headers), the same checks run in Python. See also
:mod:`fxpasses.plans.objects.watched_state`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import platform
import subprocess
import sys
import sysconfig
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fxpasses.plans.errors import PlanFileError
from fxpasses.plans.files.plan_files import read_sections, write_sections

log = logging.getLogger(__name__)

ENTRY = "fxpasses_watch"
_SOURCES = [Path(__file__).with_name(name) for name in ("watch.c", "calls.c")]
_module: types.ModuleType | None = None


@functools.cache
def build(compiler: str, directory: Path) -> bytes | None:
    """Build the shared library, or return None if that fails. It is cached in a directory of plans, since
    building takes longer than the rest of recording.

    Args:
        compiler: the one for kernels.
        directory: of the plans.

    Raises:
        OSError: the library cannot be written.
    """
    key = repr((sys.version, platform.platform(), compiler)).encode()
    key += b"".join(source.read_bytes() for source in _SOURCES)
    kept = directory / "sources" / f"{hashlib.sha256(key).hexdigest()}.check"
    with contextlib.suppress(OSError, PlanFileError):
        return read_sections(kept)["check"]
    made = _compile_library(compiler)
    if made is not None:
        write_sections(kept, {"check": made})
    return made


@functools.cache
def _compile_library(compiler: str) -> bytes | None:
    with tempfile.TemporaryDirectory(prefix="fxpasses-") as folder:
        made = Path(folder) / "watch.so"
        command = [
            compiler,
            "-O2",
            "-shared",
            "-fPIC",
            f"-I{sysconfig.get_path('include')}",
            *(part for source in _SOURCES for part in ("-x", "c", str(source))),
            "-o",
            str(made),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            log.info("checks of plans run in Python: %s", error)
            return None
        if done.returncode:
            log.info("checks of plans run in Python: %s", done.stderr[-300:])
            return None
        return made.read_bytes()


def use_library(load: Callable[[], types.ModuleType]) -> None:
    """Check in C from now on. The process's first library serves all plans: each would take one of Python's
    few dictionary watchers."""
    global _module
    if _module is None:
        _module = load()


def watched(*lists: Any) -> Any:
    """A ``Watched`` of watch.c for these lists, or None if the library is missing or cannot watch them."""
    if _module is None:
        return None
    try:
        return _module.Watched(*lists)
    except (ValueError, RuntimeError) as error:
        # A class has no version (Python ran out, or its attributes are looked up otherwise), or Python's
        # eight watchers are taken.
        log.info("a check runs in Python: %s", error)
        return None


def library() -> Any:
    """The library, or None."""
    return _module
