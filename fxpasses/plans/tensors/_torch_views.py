"""Private torch names for replaying views. AOTAutograd notes which views lead from one tensor to another, and
applies them to the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C import _functionalization

from fxpasses.plans.errors import NoPlan

_DTYPE_VIEWS = ("view_dtype_ViewMeta", "view_as_real_ViewMeta", "view_as_complex_ViewMeta")


def serialize_views(views: Any) -> list[list[Any]] | None:
    """AOTAutograd's notes about an output as plain data, or None if only the output's sizes and strides say
    it.

    Raises:
        NoPlan: the notes are of an unknown form.
    """
    if views is None:
        return None
    made = views.sequence
    if any(view.has_symbolic_inputs for view in made):
        if {type(view).__name__ for view in made} & {*_DTYPE_VIEWS}:
            raise NoPlan("an output of another type that shares memory, of symbolic sizes")
        return None
    return [[type(view).__name__, *map(_to_plain, view.as_tuple())] for view in made]


def _to_plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int):
        return value
    if type(value) is list and all(type(item) is int for item in value):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, _functionalization.InverseReturnMode):  # type: ignore[attr-defined]
        return {"mode": int(value)}
    raise NoPlan("an output that is a view of another tensor in an unknown way", repr(value))


def deserialize_views(described: Sequence[Sequence[Any]]) -> list[Any]:
    """The inverse of :func:`serialize_views`."""
    return [getattr(_functionalization, name)(tuple(map(_from_plain, values))) for name, *values in described]


def _from_plain(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "dtype" in value:
        return getattr(torch, value["dtype"])
    return _functionalization.InverseReturnMode(value["mode"])  # type: ignore[attr-defined]


def apply_views(base: torch.Tensor, views: list[Any]) -> torch.Tensor:
    """Apply these views to ``base``."""
    return _functionalization.apply_view_meta_sequence(base, views)  # type: ignore[no-any-return]
