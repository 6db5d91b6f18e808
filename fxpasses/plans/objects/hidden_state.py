"""Whether objects of a class hold state that no walk sees, or that differs by process."""

from __future__ import annotations

import copyreg
import functools
import types
from typing import Any

_MANAGED_DICT = 1 << 4


@functools.cache
def has_hidden_state(kind: type, base: type) -> bool:
    """Whether objects of a class have state outside their dictionary and slots, which only C code can see."""
    room = base.__basicsize__
    if kind.__dictoffset__ != base.__dictoffset__ and not kind.__flags__ & _MANAGED_DICT:
        room += 8
    if kind.__weakrefoffset__ != base.__weakrefoffset__:
        room += 8
    room += 8 * len(copyreg._slotnames(kind))  # type: ignore[attr-defined]
    return kind.__basicsize__ > room


def is_hash(value: int, owner: Any) -> bool:
    """Whether a number is an object's hash by content. It differs by process, like those of strings."""
    return isinstance(type(owner).__hash__, types.FunctionType) and hash(owner) == value
