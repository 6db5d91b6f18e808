"""Operators that a fake tensor mode never sees: C++ composites that look at data.

A composite runs at the autograd key, above every mode, so that no rule registered by operator is asked. For the few
whose C++ code goes wrong on fake tensors, :func:`install` puts a Python function in front of them in the dispatcher:
it hands real tensors on unchanged, and answers for fake ones. That is process-wide; this module owns it, and
:func:`uninstall` takes it back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from fake.kernels._torch import COMPOSITE, DataDependentOutputException, FakeTensor, OpOverload, no_dispatch

__all__ = ["install", "tensor_split", "uninstall"]

aten = torch.ops.aten


def tensor_split(func: OpOverload, self: torch.Tensor, indices: torch.Tensor, dim: int = 0) -> Any:
    """``tensor_split`` with a tensor of indices: only its values say how many views there are.

    Raises:
        DataDependentOutputException: the values are not known (eager's C++ would read unallocated memory).
    """
    values = getattr(indices, "constant", None)
    if values is None:
        raise DataDependentOutputException(func)
    with no_dispatch():
        places = values.tolist()
    return torch.tensor_split(self, places, dim)


#: What answers for fake tensors.
_ANSWERS: dict[str, tuple[OpOverload, Callable[..., Any]]] = {
    "tensor_split.tensor_indices_or_sections": (aten.tensor_split.tensor_indices_or_sections, tensor_split),
}

_lock = threading.Lock()
_installed: torch.library.Library | None = None


def install() -> None:
    """Put the answers in front of the composites; does nothing if they are there already."""
    global _installed
    with _lock:
        if _installed is not None:
            return
        _installed = torch.library.Library("aten", "IMPL")
        for name, (func, answer) in _ANSWERS.items():
            for key in ("AutogradCPU", "AutogradCUDA"):
                _installed.impl(name, _in_front_of(func, answer), key)


def uninstall() -> None:
    """Take the answers away again."""
    global _installed
    with _lock:
        if _installed is not None:
            _installed._destroy()
            _installed = None


def _in_front_of(func: OpOverload, answer: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(arg, FakeTensor) for arg in args):
            return answer(func, *args, **kwargs)
        return func._op_dk(COMPOSITE, *args, **kwargs)

    return dispatch
