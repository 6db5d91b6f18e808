"""What determines a compilation from outside: environment variables and our source. Imports no torch."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

_READ_PREFIXES = (
    "ATEN_", "CC", "CFLAGS", "CUDA", "CXX", "FXPASSES_", "KMP_", "LDFLAGS", "MKL_", "OMP_", "PYTORCH_", "TORCH", "TRITON_",
)  # fmt: skip
"""Prefixes of the environment variables that compilers and kernels read."""

_IGNORED_PREFIXES = (
    "TORCH_LOGS", "TORCH_TRACE", "TORCHDYNAMO_VERBOSE", "TORCH_SHOW", "TORCH_COMPILE_DEBUG",  # messages
    "FXPASSES_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_HOME", "TORCHINDUCTOR_COMPILE_THREADS",  # where, how many at once
    "FXPASSES_SILENT_AFTER",  # a timeout
    "TORCHELASTIC_",  # a launcher gives each process its own
)  # fmt: skip
"""Prefixes of variables among them that do not affect what is compiled."""


def deciding_variables() -> dict[str, str]:
    """The environment variables that compilers and kernels read, with their values, by compilation factor."""
    return {
        f"environment variable {name}": value
        for name, value in sorted(os.environ.items())
        if name.startswith(_READ_PREFIXES) and not name.startswith(_IGNORED_PREFIXES)
    }


@functools.cache
def own_source() -> str:
    """Hash of the source of the three packages, so that a new version never runs what an old one compiled."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[2]
    for package in ("compiled_autograd", "fake", "fxpasses"):
        for folder, _, names in sorted(os.walk(root / package)):
            for name in sorted(names):
                if name.endswith(".py"):
                    path = os.path.join(folder, name)
                    with open(path, "rb") as file:
                        digest.update(f"{os.path.relpath(path, root)}\0".encode() + file.read())
    return digest.hexdigest()[:32]
