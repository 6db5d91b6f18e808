"""Numbers of dtypes that torch stores but has few kernels for."""

from __future__ import annotations

import torch
from torch import Tensor

_WIDER = {
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.float8_e8m0fnu: torch.float32,
    torch.complex32: torch.complex64,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
}


def computable(value: Tensor) -> Tensor:
    """Convert to a dtype that torch can compare, sort and sum. ``uint64`` is reinterpreted as ``int64``."""
    if value.dtype is torch.uint64:
        return value.view(torch.int64)
    wider = _WIDER.get(value.dtype)
    return value if wider is None else value.to(wider)


def became(first: float, second: float) -> str:
    """Describe a change from one number to another, with enough digits to tell them apart.

    >>> became(0.5, 0.25), became(0.1, 0.1 + 1e-16), became(0.5, 0.5)
    ('0.5 became 0.25', '0.1 became 0.1000000000000001', '0.5 became 0.5')
    """
    digits = next(
        (digits for digits in (9, 12, 15, 16) if f"{first:.{digits}g}" != f"{second:.{digits}g}"), 17
    )
    if first == second:
        digits = 9
    return f"{first:.{digits}g} became {second:.{digits}g}"
