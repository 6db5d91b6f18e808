"""Numbers of types that torch stores, but has few kernels for."""

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
    """The same numbers in a type that torch compares, sorts and adds up; the bits of unsigned integers of eight bytes as signed ones."""
    if value.dtype is torch.uint64:
        return value.view(torch.int64)
    wider = _WIDER.get(value.dtype)
    return value if wider is None else value.to(wider)
