"""Checks of numbers that are converted to the dtype of a result."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from fake.kernels._torch import OpOverload
from fake.kernels.checks.registry import check_for, refuse
from fake.kernels.dtypes import result_type

__all__ = ["has_range", "numbers_can_be_held", "overflows"]


#: Numbers that eager converts to the dtype of the result, by operator: whatever the size, or only if there are elements.
_CONVERTED = {
    ("fill", "fill_", "masked_fill", "masked_fill_", "constant_pad_nd"): ("value",),
    ("full", "full_like", "new_full"): ("fill_value",),
    ("scalar_tensor",): ("s",),
    ("addcmul", "addcmul_", "addcdiv", "addcdiv_"): ("value",),
    ("lerp", "lerp_"): ("weight",),
    ("threshold", "threshold_"): ("threshold", "value"),
    ("softplus",): ("beta", "threshold"),
    ("_unsafe_masked_index",): ("fill",),
    ("clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_"): ("min", "max"),
}
_CONVERTED_IF_ANY = {
    ("scatter", "scatter_", "index_fill", "index_fill_"): ("value",),
    ("addmm", "addmm_", "addbmm", "addbmm_", "baddbmm", "baddbmm_", "addmv", "addmv_", "addr", "addr_"): ("beta", "alpha"),
}  # fmt: skip


def _numbers(func: OpOverload, given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    name = func._schema.name.split("::")[1]
    for names, arguments in {**_CONVERTED, **_CONVERTED_IF_ANY}.items():
        if name in names:
            yield from (
                (a, given[a]) for a in arguments if isinstance(given.get(a), bool | int | float | complex)
            )


def _converts_nothing(func: OpOverload, given: dict[str, Any]) -> bool:
    """Whether eager looks at the numbers only if there are elements, and there are none."""
    name = func._schema.name.split("::")[1]
    return any(name in names for names in _CONVERTED_IF_ANY) and any(
        value.numel() == 0 for value in given.values() if isinstance(value, torch.Tensor)
    )


@check_for(*{name for table in (_CONVERTED, _CONVERTED_IF_ANY) for names in table for name in names})
def numbers_can_be_held(func: OpOverload, given: dict[str, Any]) -> None:
    """A number fits into the dtype that it is converted to (c10's checked conversion)."""
    numbers = list(_numbers(func, given))
    dtype = _computed_in(func, given, [value for _, value in numbers]) if numbers else None
    if dtype is not None:
        for name, value in numbers:
            refuse(
                overflows(value, dtype) and not _converts_nothing(func, given), func,
                f"value {value!r} of argument {name!r} cannot be converted to type {dtype} without overflow",
            )  # fmt: skip


def _computed_in(func: OpOverload, given: dict[str, Any], numbers: list[Any]) -> torch.dtype | None:
    """The dtype of the result, as far as tensors and a ``dtype`` decide it; clamping promotes by its bounds, too."""
    name = func._schema.name.split("::")[1].rstrip("_")
    if name in ("full", "scalar_tensor"):
        if given.get("out") is not None:
            return given["out"].dtype
        return given.get("dtype") or (None if name == "full" else torch.get_default_dtype())
    if name in ("full_like", "new_full"):
        return given.get("dtype") or given["self"].dtype
    if name in (
        "_unsafe_masked_index",
        "fill",
        "masked_fill",
        "constant_pad_nd",
        "scatter",
        "index_fill",
        "threshold",
    ):
        return given["self"].dtype
    tensors = [value for key, value in given.items() if isinstance(value, torch.Tensor) and key != "out"]
    operands = [*tensors, *(numbers if name.startswith("clamp") else ())]
    return result_type(operands)


def overflows(value: Any, dtype: torch.dtype) -> bool:
    """Whether c10 refuses to convert a number: complex to real, or out of range; truncation passes.

    Negative integers wrap around in unsigned dtypes, other negative numbers do not.

    >>> overflows(300, torch.uint8), overflows(-1, torch.uint8), overflows(-1.0, torch.uint8), overflows(2.5, torch.int8)
    (True, False, True, False)
    """
    if isinstance(value, complex):
        if dtype.is_complex:
            return False
        if value.imag != 0:
            return dtype is not torch.bool
        value = value.real
    if dtype is torch.bool or dtype.is_complex or isinstance(value, bool):
        return False
    if dtype.is_floating_point:
        return math.isfinite(value) and abs(value) > torch.finfo(dtype).max
    if isinstance(value, float) and not math.isfinite(value):
        return True
    info = torch.iinfo(dtype)
    lowest = -info.max if info.min == 0 and isinstance(value, int) else info.min
    return not lowest <= value <= info.max


@check_for("random", "randint", "randint_like")
def has_range(func: OpOverload, given: dict[str, Any]) -> None:
    """There is a number to draw, and the dtype holds the least and the greatest that may be drawn."""
    low, high = given.get("from", given.get("low", 0)), given.get("to", given.get("high"))
    if not isinstance(low, int | torch.SymInt) or not isinstance(high, int | torch.SymInt):
        return
    refuse(
        low >= high, func,
        f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}",
    )  # fmt: skip
    dtype = given.get("dtype")
    if not isinstance(
        dtype, torch.dtype
    ):  # left out: a number in the schema of ``randint``, nothing in others
        dtype = given["self"].dtype if "self" in given else torch.int64
    limits: tuple[float, float] = (0, 1)
    if dtype is not torch.bool:
        kind = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        limits = (kind.min, kind.max)
    for name, value in (("from", low), ("to - 1", high - 1)):
        if isinstance(value, int):  # sizes are held by any dtype that indices have
            refuse(not limits[0] <= value <= limits[1], func, f"{name} is out of bounds for {dtype}")
