"""Fake tensors on ``cuda`` in a build of torch without CUDA: the device guard that torch's C++ code requires.

Indexing, ``copy_``, ``.to("cuda")`` and autograd's nodes request a device's guard before any dispatch mode
sees the call. Without a guard they raise, and in a constructor that must not raise the process aborts. For
builds *with* CUDA on a machine without a GPU, torch's ``_ensureCUDADeviceGuardSet`` replaces a guard that
reports zero devices with one that does nothing. This module makes it do the same, on request, in builds
without CUDA, which have no guard registered.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from fake.seam.dispatch import ensure_cuda_device_guard
from fake.seam.patches import LEDGER, Edit, When

_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
"""``c10::impl::device_guard_impl_registry``: an array of pointers to guards, by device type."""

_CUDA = 1  # c10::DeviceType::CUDA
_METHODS = 64  # more virtual methods than the interface has


def allow_cuda() -> bool:
    """Let fake tensors on ``cuda`` work in a build of torch without CUDA as in one with it,
    for the rest of the process.

    The first operator asked for a fake tensor on ``cuda`` calls this. Until then, code that asks for the
    device before it calls an operator (``x.cuda()``, ``module.to("cuda")``) raises torch's error; a program
    that starts with such code must call this first.

    Returns:
        Whether ``cuda`` has a guard now. False on platforms whose libraries are laid out differently.

    >>> import torch, fake
    >>> if fake.allow_cuda():
    ...     with fake.FakeTensorMode():
    ...         print(torch.ones(3, 2, device="cuda", requires_grad=True)[0].device)
    cuda:0
    """
    if LEDGER.is_in_force(PATCHES[0]) or torch.backends.cuda.is_built():
        return True
    LEDGER.keep(*PATCHES)
    return LEDGER.is_in_force(PATCHES[0])


def _put_guard() -> Callable[[], None]:
    registry = _registry()
    assert registry is not None
    if not registry[_CUDA]:
        _register(registry)
    return lambda: None  # never undone: C++ code may hold the guard


def _unfit() -> str:
    if torch.backends.cuda.is_built():
        return "this torch was built with CUDA, and has guards of its own"
    return "" if _registry() is not None else "the library of this build of torch has no such table"


PATCHES = LEDGER.add(
    Edit(
        "c10::impl::device_guard_impl_registry: a guard for cuda that does nothing (fake.allow_cuda)",
        _put_guard,
        when=When.REQUEST,
        versions=None,
        unfit=_unfit,
        lost="fake tensors on cuda cannot be indexed, copied or differentiated in a torch without CUDA",
    )
)


def _registry() -> ctypes.Array[ctypes.c_void_p] | None:
    libraries = list((Path(torch.__file__).parent / "lib").glob("libc10.*"))
    if not libraries or ensure_cuda_device_guard is None:
        return None
    try:
        return (ctypes.c_void_p * (_CUDA + 1)).in_dll(ctypes.CDLL(str(libraries[0])), _REGISTRY)
    except (OSError, ValueError):  # linked another way, or with other symbol names
        return None


def _register(registry: ctypes.Array[ctypes.c_void_p]) -> None:
    """Register a guard whose methods, device count included, return 0; torch replaces it with its own."""
    zero = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p)(lambda _: 0)
    address = ctypes.cast(zero, ctypes.c_void_p).value
    methods = (ctypes.c_void_p * _METHODS)(*(address for _ in range(_METHODS)))
    guard = ctypes.c_void_p(ctypes.addressof(methods))
    registry[_CUDA] = ctypes.addressof(guard)  # type: ignore[call-overload]
    ensure_cuda_device_guard()
    if registry[_CUDA] == ctypes.addressof(guard):  # type: ignore[comparison-overlap]
        registry[_CUDA] = None  # type: ignore[call-overload]
