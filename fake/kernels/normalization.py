"""Rules for normalizations on CPU, which choose the memory format of their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fake.kernels.outputs import fresh, in_format_of, is_symbolic, row_major
from fake.kernels.rule_registry import Args, FakeTensorMode, Kwargs, OpOverload, rule
from fake.seam.dispatch import suggest_memory_format
from fake.seam.fake_tensor import torch_result

aten = torch.ops.aten


@rule(
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::_native_batch_norm_legit.no_stats",
    "aten::_batch_norm_with_update",
)
def _batch_norm(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return a row-major or channels-last output, whichever suits the input; never just its strides."""
    input = args[0]
    output, *statistics = _torch_batch_norm(mode, func, args, kwargs)
    if input.device.type == "cpu":
        format = None if is_symbolic(args, kwargs) else _contiguous_format(input, args[1:5])
        output = _in_memory_format(mode, output, input, format)
    return (output, *_statistics(mode, statistics, input, args[1:5]))


def _statistics(
    mode: FakeTensorMode, statistics: Sequence[torch.Tensor], input: torch.Tensor, others: Sequence[Any]
) -> list[torch.Tensor]:
    """Return mean and deviation in the parameters' dtype: float32 if only the input has low precision.

    Args:
        mode: the mode that the results belong to.
        statistics: torch's mean and deviation, and further results, which are kept.
        input: what is normalized.
        others: the weight, the bias and running statistics, those that there are.
    """
    parameter = next((other for other in others if isinstance(other, torch.Tensor)), input)
    if input.device.type != "cpu" or parameter.dtype is input.dtype:
        return list(statistics)
    with mode:
        return [*(t.to(parameter.dtype) for t in statistics[:2]), *statistics[2:]]


def _in_memory_format(
    mode: FakeTensorMode, result: torch.Tensor, input: torch.Tensor, format: torch.memory_format | None
) -> torch.Tensor:
    """Return ``result`` in a memory format, by default the one that ``input`` suggests."""
    if format is None:
        return in_format_of(mode, result, input)
    with mode:
        return torch.empty_like(result, memory_format=format)


def _torch_batch_norm(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return torch's answer, without arguments that its decomposition raises on and no result depends on.

    CPU kernels treat an empty weight or bias as missing. torch's choice of a backend needs both weight and
    bias where eager accepts one of them. The running variance is divided by the number of elements per
    channel minus one.
    """
    if args[0].device.type == "cpu" and not is_symbolic(args, kwargs):
        args = (args[0], *(None if a is not None and a.numel() == 0 else a for a in args[1:3]), *args[3:])
    if func.name() == "aten::_batch_norm_with_update":
        parameter = next((a for a in args[1:5] if a is not None), None)
        args = (args[0], *(parameter if a is None else a for a in args[1:3]), *args[3:])
    with_statistics = func.name() == "aten::_batch_norm_with_update" or (len(args) == 8 and args[5])
    if with_statistics and not is_symbolic(args, kwargs) and args[0].numel() == args[0].shape[1]:
        settings = args[5:] if len(args) == 8 else (True, *args[5:])
        result = torch_result(mode, aten._native_batch_norm_legit.no_stats, (*args[:3], *settings), {})
        return (
            result
            if len(args) == 8
            else (*result, fresh(mode, (0,), None, dtype=torch.uint8, device=args[0].device))
        )
    return torch_result(mode, func, args, kwargs)


def _contiguous_format(input: torch.Tensor, others: tuple[Any, ...]) -> torch.memory_format | None:
    """Return the format in which the input is contiguous, if the other arguments are, too; else ``None``.

    Sizes of 1 make strides ambiguous: the input may be contiguous in a format that it does not suggest.
    """
    if not all(other.is_contiguous() for other in others if isinstance(other, torch.Tensor)):
        return None
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    candidates = (torch.contiguous_format, formats.get(input.dim(), torch.contiguous_format))
    return next((format for format in candidates if input.is_contiguous(memory_format=format)), None)


@rule("aten::native_batch_norm_backward", "aten::batch_norm_backward")
def _batch_norm_backward(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Choose the format as in forward if the incoming gradient is contiguous and suggests the same one."""
    incoming, input = args[:2]
    grad_input, *gradients = torch_result(mode, func, args, kwargs)
    if grad_input is not None and input.device.type == "cpu":
        dense = not is_symbolic(args, kwargs) and _contiguous_format(incoming, ()) is not None
        alike = dense and suggest_memory_format(input) == suggest_memory_format(incoming)
        format = _contiguous_format(input, ()) if alike else None
        grad_input = _in_memory_format(mode, grad_input, input, format)
    return (grad_input, *gradients)


@rule("aten::native_layer_norm")
def _layer_norm(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return row-major results: the kernel makes its inputs row-major first."""
    output, *statistics = row_major(mode, torch_result(mode, func, args, kwargs))
    return (output, *_statistics(mode, statistics, args[0], args[2:4]))


@rule("aten::native_group_norm")
def _group_norm(mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Return an output in the format that the input suggests, even if sizes of 1 make strides ambiguous.

    The arguments determine the shape of the statistics, whatever the input's sizes."""
    input, weight, bias, batch, _, _, groups, _ = args
    if input.device.type != "cpu":
        return torch_result(mode, func, args, kwargs)
    with mode:
        statistics = [input.new_empty((batch, groups)) for _ in range(2)]
    return (in_format_of(mode, input, input), *_statistics(mode, statistics, input, (weight, bias)))
