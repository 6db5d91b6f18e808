"""Fake tensors on ``cuda`` in a build of torch without CUDA: the device guard that torch's C++ code asks for.

Indexing, ``copy_``, ``.to("cuda")`` and autograd's nodes ask for the guard of a device before any dispatch mode hears of
the call; without one they raise, and in a constructor that must not raise the process aborts. For builds *with* CUDA
on a machine without a GPU torch has an answer: ``_ensureCUDADeviceGuardSet`` puts a guard that does nothing in the place
of one that counts no devices. Here is what makes it do the same in builds without CUDA, whose place is empty.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import torch

from fake import _torch as _t

__all__ = ["ensure_cuda_guard"]

_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
"""``c10::impl::device_guard_impl_registry``: an array of pointers to guards, by device type."""

_CUDA = 1  # c10::DeviceType::CUDA
_METHODS = 64  # more virtual methods than the interface has

_lock = threading.Lock()
_answer: bool | None = None


def ensure_cuda_guard() -> bool:
    """Let C++ code handle ``cuda`` fake tensors where torch was built without CUDA; once, later calls do nothing.

    Returns:
        Whether there is a guard for ``cuda`` now. False on platforms whose libraries look otherwise: there, what needs
        one raises torch's error.
    """
    global _answer
    if _answer is None:
        with _lock:
            if _answer is None:
                _answer = torch.backends.cuda.is_built() or _ensure()
    return _answer


def _ensure() -> bool:
    registry = _registry()
    if registry is None:
        return False
    if not registry[_CUDA]:
        _register(registry)
    return bool(registry[_CUDA])


def _registry() -> ctypes.Array[ctypes.c_void_p] | None:
    libraries = list((Path(torch.__file__).parent / "lib").glob("libc10.*"))
    if not libraries or _t.ensure_cuda_device_guard is None:
        return None
    try:
        return (ctypes.c_void_p * (_CUDA + 1)).in_dll(ctypes.CDLL(str(libraries[0])), _REGISTRY)
    except (OSError, ValueError):  # another way of linking, or of naming symbols
        return None


def _register(registry: ctypes.Array[ctypes.c_void_p]) -> None:
    """A guard all of whose methods return 0, the number of devices too, is what torch replaces with its own."""
    zero = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(lambda _: 0)
    address = ctypes.cast(zero, ctypes.c_void_p).value
    methods = (ctypes.c_void_p * _METHODS)(*(address for _ in range(_METHODS)))
    guard = ctypes.c_void_p(ctypes.addressof(methods))
    registry[_CUDA] = ctypes.addressof(guard)  # type: ignore[call-overload]
    _t.ensure_cuda_device_guard()
    if registry[_CUDA] == ctypes.addressof(guard):  # type: ignore[comparison-overlap]
        registry[_CUDA] = None  # type: ignore[call-overload]
