"""References to objects that calls receive. A plan releases them when their owner does."""

from __future__ import annotations

import copyreg
import functools
import weakref
from collections.abc import Callable
from typing import Any

from fxpasses.plans.objects.kinds import HEAP_TYPE


def can_be_weak(value: Any) -> bool:
    """Whether a plan need not keep an object alive: a module, an optimizer or another bag of attributes."""
    kind = type(value)
    return (
        kind.__weakrefoffset__ != 0
        and kind.__dictoffset__ != 0
        and not copyreg._slotnames(kind)  # type: ignore[attr-defined]
        and kind is not functools.partial
        and next(base for base in kind.__mro__ if not base.__flags__ & HEAP_TYPE) is object
    )


def reference_to(value: Any, on_collected: Callable[[Any], None] | None = None) -> Callable[[], Any]:
    """A function that returns the object, or None once it is gone. The object is kept unless it
    :func:`can_be_weak`; then ``on_collected`` is called."""
    return weakref.ref(value, on_collected) if can_be_weak(value) else lambda: value
