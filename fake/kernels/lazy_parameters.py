"""Lazy modules (``nn.LazyConv2d``, ...) under a fake tensor mode.

``UninitializedParameter`` makes a subclass object out of an empty tensor, in C++, which a fake tensor refuses: it has
its Python object already. :func:`install` puts a constructor in front of torch's that gives the empty fake tensor
another class instead, one that is both uninitialized and fake; ``materialize`` turns it back. With no fake mode
active it is torch's own constructor. That is process-wide; this module owns it, and :func:`uninstall` takes it back.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fake.kernels._torch import active_fake_mode

__all__ = ["install", "uninstall"]

_lock = threading.Lock()
_torchs_new: dict[type, Any] = {}


@functools.cache
def _uninitialized_class(base: type, fake_class: type) -> type:
    """A class of fake tensors that behaves like ``base`` until it is materialized."""
    return type(
        f"{base.__name__}Of{fake_class.__name__}",
        (base, fake_class),
        {
            "cls_to_become": fake_class,
            "__doc__": f"{base.__doc__}",
            "__deepcopy__": _deepcopy,
            "made_by": base,
        },
    )


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    if id(self) not in memo:
        memo[id(self)] = self.made_by(self.requires_grad, self.data.device, self.data.dtype)
    return memo[id(self)]


def _new(
    cls: type,
    requires_grad: bool = False,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    data = torch.empty(0, device=device, dtype=dtype)
    fake_class = type(data)
    data.requires_grad_(requires_grad)
    if issubclass(cls, torch.nn.Parameter):
        data._is_param = True
    data.__class__ = _uninitialized_class(cls, fake_class)
    return data


def _in_front_of(torchs: Any, requires_grad_by_default: bool) -> Any:
    @functools.wraps(torchs)
    def new(cls: type, requires_grad: bool = requires_grad_by_default, *args: Any, **kwargs: Any) -> Any:
        make = torchs if active_fake_mode() is None else _new
        return make(cls, requires_grad, *args, **kwargs)

    return new


def install() -> None:
    """Let uninitialized parameters and buffers be made under a fake mode; does nothing if done already."""
    with _lock:
        if _torchs_new:
            return
        for cls, by_default in ((UninitializedParameter, True), (UninitializedBuffer, False)):
            _torchs_new[cls] = cls.__new__
            cls.__new__ = staticmethod(_in_front_of(cls.__new__, by_default))  # type: ignore[method-assign,assignment]


def uninstall() -> None:
    """Give torch's constructors back."""
    with _lock:
        for cls, new in _torchs_new.items():
            cls.__new__ = staticmethod(new)  # type: ignore[method-assign]
        _torchs_new.clear()
