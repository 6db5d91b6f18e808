"""Kernels over images that keep channels-last inputs channels-last: unpooling, padding, shuffling."""

from __future__ import annotations

from typing import Any

from fake.kernels._torch import FakeTensorMode, OpOverload, torchs_answer
from fake.kernels.outputs import in_format_of, is_symbolic
from fake.kernels.registry import Args, Kwargs, rule
from fake.kernels.structured import structured


@rule(
    "aten::max_unpool2d",
    "aten::reflection_pad2d",
    "aten::reflection_pad3d",
    "aten::replication_pad2d",
    "aten::replication_pad3d",
    "aten::channel_shuffle",
    "aten::native_channel_shuffle",
)
def _keeps_format(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """torch's checks and shape, in the first argument's memory format, as the CPU kernels allocate it."""
    return _in_format_on_cpu(mode, torchs_answer(mode, func, args, kwargs), args[0])


@rule(
    "aten::reflection_pad2d_backward",
    "aten::reflection_pad3d_backward",
    "aten::replication_pad2d_backward",
    "aten::replication_pad3d_backward",
)
def _keeps_format_of_input(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """A gradient, in the memory format of the input (the second argument)."""
    return _in_format_on_cpu(mode, torchs_answer(mode, func, args, kwargs), args[1])


@rule("aten::max_pool2d_with_indices")
def _max_pool(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """As all structured operators; but for no images, torch's answer: behind the structured one stands a decomposition
    that cannot reshape nothing."""
    if is_symbolic(args, kwargs) or args[0].numel() != 0:
        return structured(mode, func, args, kwargs)
    return torchs_answer(mode, func, args, kwargs)


@rule("aten::pixel_unshuffle")
def _pixel_unshuffle(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """The CPU's kernel returns a copy of an image without elements, as it is."""
    if is_symbolic(args, kwargs) or args[0].device.type != "cpu" or args[0].numel() != 0:
        return NotImplemented
    with mode:
        return args[0].clone()


def _in_format_on_cpu(mode: FakeTensorMode, answer: Any, input: Any) -> Any:
    return in_format_of(mode, answer, input) if input.device.type == "cpu" else answer
