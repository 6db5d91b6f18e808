"""The custom-op API of torch 2.0 to 2.3, for code that still uses it.
New code should use `fake.library.custom_op`.

`custom_op`, `impl`, `impl_save_for_backward` and `impl_backward` are those of torch's own
``torch._custom_ops``, which warns that it is deprecated; `impl_fake` is `fake.library.register_fake`.
`object_custom_op` is the older decorator: it returns a `CustomOp` object with these functions as methods. A
backward formula is ``backward(ctx, saved, *grads)`` and returns a dict from argument names to gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fake.library.libraries import Library
from fake.library.register import get_ctx, impl_abstract, register_fake
from fake.seam import old_custom_op as _torch

__all__ = [
    "DEVICE_KEYS",
    "CustomOp",
    "Library",
    "custom_op",
    "find_op",
    "get_ctx",
    "impl",
    "impl_abstract",
    "impl_backward",
    "impl_fake",
    "impl_save_for_backward",
    "object_custom_op",
]

#: The device types that this API supports.
DEVICE_KEYS = _torch.DEVICE_KEYS

impl = _torch.impl
impl_save_for_backward = _torch.impl_save_for_backward
impl_backward = _torch.impl_backward
#: The dispatcher's operator with a given name; raises ValueError if there is none.
find_op = _torch.get_op
_destroy = _torch.destroy


class CustomOp(_torch.CustomOp):
    """An operator of the old API. Created by `object_custom_op`; lives until `_destroy`."""

    alive = _torch.global_registry
    impl_fake = _torch.CustomOp.impl_abstract


def custom_op(qualname: str, func_or_schema: Any = None) -> Any:
    """Define an operator from an annotated prototype (as a decorator) or a schema;
    `impl` and friends complete it.

    Raises:
        ValueError: the name, namespace, prototype or schema is invalid.
    """
    defined = _torch.custom_op(qualname, func_or_schema)
    return find_op(qualname) if isinstance(func_or_schema, str) else defined


def object_custom_op(
    qualname: str, manual_schema: str | None = None
) -> Callable[[Callable[..., Any]], CustomOp]:
    """Define an operator in the oldest form: a decorator that returns a `CustomOp`.

    Raises:
        ValueError: as in `custom_op`; also if the function's signature does not match ``manual_schema``.
    """
    decorate = _torch.object_custom_op(qualname, manual_schema)

    def define(function: Callable[..., Any]) -> CustomOp:
        made = decorate(function)
        made.__class__ = CustomOp
        return made

    return define


def impl_fake(qualname: str, *, func: Callable[..., Any] | None = None) -> Any:
    """Register the fake kernel: see `fake.library.register_fake`."""
    return register_fake(qualname, func)
