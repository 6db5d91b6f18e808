"""What a compilation depends on besides model and arguments: versions, hardware, settings, state of torch."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fxpasses.compiling.environment import deciding_variables, own_source
from fxpasses.plans import _torch
from fxpasses.plans.errors import NoPlan, PlanFileError
from fxpasses.plans.files.plan_files import cache_directory, check_owner, write_atomically

log = logging.getLogger(__name__)


def surroundings() -> dict[str, str]:
    """Factors of every plan that do not change while a process runs, by name.

    Raises:
        NoPlan: a search for a faulty pass limits what is compiled, a block adds passes, or a setting is an
            object without an identity.
    """
    if "FXPASSES_LIMITS" in os.environ:
        raise NoPlan("compilations are limited by a search for a fault")
    registry = sys.modules.get("fxpasses.passes.registry")
    if registry is not None and registry.active_passes():
        raise NoPlan("a use_passes block adds passes")
    found = dict(_process_constants())
    found |= deciding_variables()
    found |= {f"setting {name}": _setting_text(value) for name, value in _torch.changed_settings().items()}
    return found


def _setting_text(value: Any) -> str:
    """The text of a setting.

    If the text has an object's address, it is the object's ``uuid()`` instead, by which Inductor also keys
    its caches.
    """
    text = repr(value)
    if " at 0x" not in text:
        return text
    identity = value.uuid() if hasattr(value, "uuid") else None
    if identity is None:
        raise NoPlan("a setting that is an object")
    return f"{type(value).__module__}.{type(value).__qualname__} {identity!r}"


@functools.cache
def _process_constants() -> Mapping[str, str]:
    return {
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "python": sys.version,
        "platform": platform.platform(),
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "processor": _cpu_features(),
        "fxpasses": _own_source(),
    }


def _cpu_features() -> str:
    """The features of the processor, as reported by the operating system kernel."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = {line for line in file if line.startswith(("flags", "Features", "model name"))}
    except OSError:
        return platform.processor()
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()[:16]


def _own_source() -> str:
    """A hash of our source, cached by file metadata: reading the source takes longer than running a plan."""
    root = Path(__file__).resolve().parents[3]
    files = [
        file
        for package in ("compiled_autograd", "fake", "fxpasses")
        for file in _python_files(root / package)
    ]
    seen = hashlib.sha256(str(root).encode())
    for path, found in files:
        seen.update(
            f"\0{path}\0{found.st_size}\0{found.st_mtime_ns}\0{found.st_ctime_ns}\0{found.st_ino}".encode()
        )
    directory = cache_directory("auto")
    cached = None if directory is None else directory / "sources" / seen.hexdigest()
    try:
        if cached is not None:
            check_owner(cached)
            return cached.read_text()
    except (OSError, PlanFileError):
        pass  # computed below
    text = own_source()
    try:
        if cached is not None:
            write_atomically(cached, text.encode())
    except OSError as error:
        log.info("the hash of our source is not remembered: %s", error)
    return text


def _python_files(folder: str | Path) -> list[tuple[str, os.stat_result]]:
    found, folders = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                found.append((entry.path, entry.stat()))
            elif entry.is_dir() and entry.name != "__pycache__":
                folders.append(entry.path)
    return sorted(found) + [file for inner in sorted(folders) for file in _python_files(inner)]


STATE = (
    "gradients enabled", "inference mode", "number of threads", "default dtype", "deterministic algorithms", "deterministic, warnings only", "process of a job",
    *_torch.NUMERIC_FLAGS,
)  # fmt: skip
"""What the values of :func:`state` are."""


def state() -> tuple[Any, ...]:
    """The state of torch that a compilation depends on and that may change at any time. ``STATE`` names its
    parts.

    Raises:
        NoPlan: torch is in a state in which calls have an unusual meaning.
    """
    unusual = _torch.unusual_state()
    if unusual:
        raise NoPlan(unusual)
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads(), str(torch.get_default_dtype()),
        torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
        _torch.distributed_process(),
        *_torch.numeric_flags(),
    )  # fmt: skip
