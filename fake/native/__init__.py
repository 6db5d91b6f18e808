"""An optional function in C++, for cached operators on symbolic sizes.

torch keeps with a tensor's sizes what it has found out about them (whether they are contiguous, their product), and
copies that where it copies a tensor. But no function that Python can call puts a copy on another storage, so every fake
tensor is asked anew: a step with symbolic sizes spends a third of its time on that. ``like.cpp`` is the missing function.

Nothing needs it. ``python -m fake.native`` compiles it (a few seconds; it takes a C++ compiler) to a directory of the
user's, by torch's version and the text of the function; from then on it is found and used. ``FAKE_NATIVE=0`` leaves it
alone.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..errors import NativeBuildError

__all__ = ["build", "library", "load"]

_NAME = "fake_native"
_SOURCE = Path(__file__).with_name("like.cpp")


def library() -> Path:
    """Where the compiled function is, or will be: another place for another torch, Python, machine or text."""
    parts = (
        torch.__version__,
        torch.version.git_version,
        sys.implementation.cache_tag,
        platform.machine(),
        _SOURCE.read_text(),
    )
    key = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    return Path(root) / f"{_NAME}_{key}" / f"{_NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"


def build() -> Path:
    """Compile the function, for this process's torch; returns the library.

    Raises:
        NativeBuildError: there is no compiler, or it fails; what it said is told.
    """
    from torch.utils import cpp_extension  # takes longer to import than all of this package

    target = library()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        made = Path(directory) / target.name
        command = [
            cpp_extension.get_cxx_compiler(), "-O2", "-std=c++20", "-fPIC", "-shared",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            *[f"-isystem{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_paths()["include"])],
            str(_SOURCE), "-o", str(made),
            *[f"-L{path}" for path in cpp_extension.library_paths()], "-lc10", "-ltorch_cpu", "-ltorch_python",
        ]  # fmt: skip
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise NativeBuildError(command, str(error)) from error
        if result.returncode:
            raise NativeBuildError(command, result.stderr)
        os.replace(made, target)
    return target


def load() -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] | None:
    """``like(pattern, base)`` if it was compiled, else None: a tensor with the sizes of ``pattern``, as a view of ``base``
    or on a storage of its own."""
    path = library()
    if os.environ.get("FAKE_NATIVE") == "0" or not path.exists():
        return None
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None
    assert spec.loader is not None
    try:
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        warnings.warn(
            f"{path} cannot be loaded and is not used ({error}); compile it again: python -m fake.native",
            stacklevel=2,
        )
        return None
    like: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] = module.like
    return like
