"""Lazy modules (``nn.LazyConv2d``, ...) under a fake tensor mode.

``UninitializedParameter`` makes a subclass object from an empty tensor in C++. That fails for a fake tensor,
which already has a Python object. While a mode of this package exists, a constructor in front of torch's
changes the class of the empty fake tensor instead, to one that is both uninitialized and fake;
``materialize`` changes it back. Without an active fake mode, torch's own constructor runs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fake.seam.dispatch import active_fake_mode
from fake.seam.patches import LEDGER, Patch, When

#: Classes by the ids of their bases, because an engine's class may compare equal to torch's.
_classes: dict[tuple[int, int], type] = {}


def _uninitialized_class(base: type, fake_class: type) -> type:
    """Return a fake tensor class that behaves like ``base`` until it is materialized."""
    key = (id(base), id(fake_class))
    if key not in _classes:
        _classes[key] = _make_class(base, fake_class)
    return _classes[key]


def _make_class(base: type, fake_class: type) -> type:
    """Make a class whose metaclass combines those of both bases and compares by identity."""
    metaclasses = (type(base), type(fake_class))
    bases = tuple(m for m in metaclasses if not any(o is not m and issubclass(o, m) for o in metaclasses))
    metaclass = type(
        "UninitializedMeta", tuple(dict.fromkeys(bases)), {"__eq__": type.__eq__, "__hash__": type.__hash__}
    )
    return metaclass(
        f"{base.__name__}Of{fake_class.__name__}",
        (base, fake_class),
        {
            "cls_to_become": fake_class,
            "__doc__": f"{base.__doc__}",
            "__deepcopy__": _deepcopy,
            "made_by": base,
            # The engine reads ``shape`` to cast or materialize the parameter; torch's property would raise.
            "shape": torch.Tensor.shape,
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


def _wrap_new(torchs: Any, requires_grad_by_default: bool) -> Any:
    @functools.wraps(torchs)
    def new(cls: type, requires_grad: bool = requires_grad_by_default, *args: Any, **kwargs: Any) -> Any:
        make = torchs if active_fake_mode() is None else _new
        return make(cls, requires_grad, *args, **kwargs)

    return new


PATCHES = LEDGER.add(
    *(
        Patch(
            cls,
            "__new__",
            lambda torchs, by_default=by_default: staticmethod(_wrap_new(torchs, by_default)),  # type: ignore[misc]
            when=When.MODE,
            versions=None,
            lost="lazy modules cannot be made under a fake tensor mode",
        )
        for cls, by_default in ((UninitializedParameter, True), (UninitializedBuffer, False))
    )
)
