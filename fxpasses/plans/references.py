"""References to objects that calls are given: a plan lets go of them when whoever gave them does."""

from __future__ import annotations

import copyreg
import functools
import weakref
from collections.abc import Callable
from typing import Any

_HEAP_TYPE = 1 << 9


def can_go(value: Any) -> bool:
    """Whether a plan does without keeping an object: modules, optimizers and the like, which are what their attributes are."""
    kind = type(value)
    return (
        kind.__weakrefoffset__ != 0
        and kind.__dictoffset__ != 0
        and not copyreg._slotnames(kind)  # type: ignore[attr-defined]
        and kind is not functools.partial
        and next(base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE) is object
    )


def reference_to(value: Any, gone: Callable[[Any], None] | None = None) -> Callable[[], Any]:
    """What returns the object, or None when it is gone. It is kept unless it :func:`can_go`; then ``gone`` is called."""
    return weakref.ref(value, gone) if can_go(value) else lambda: value
