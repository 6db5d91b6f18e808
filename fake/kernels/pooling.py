"""Pooling kernels that keep channels-last inputs channels-last."""

from __future__ import annotations

from typing import Any

from fake.kernels._torch import FakeTensorMode, OpOverload, suggest_memory_format, torchs_answer
from fake.kernels.registry import rule

__all__ = ["max_unpool2d"]


@rule("aten::max_unpool2d")
def max_unpool2d(
    mode: FakeTensorMode, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """torch's checks and shape, in the input's memory format (``aten/src/ATen/native/MaxUnpooling.cpp``)."""
    answer = torchs_answer(mode, func, args, kwargs)
    with mode:
        return answer.contiguous(memory_format=suggest_memory_format(args[0]))
