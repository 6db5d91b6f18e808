"""The engine's checks of each gradient that flows into a node, run by captured graphs.

The rules are those of ``validate_outputs`` and ``InputMetadata`` in torch's ``engine.cpp`` and
``input_metadata.h``.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from compiled_autograd import _torch
from fake.error_text import error_text

Grad = torch.Tensor | None
_TRACING_PREFIX = "[Compiled Autograd Tracing:]"
"""C++'s prefix, instead of the function's name, when it rejects a gradient."""


def plain_metadata(packed: Any) -> tuple[torch.dtype, str, tuple[Any, ...]] | None:
    """Return dtype, device and sizes packed by C++ for a node's input, or None if there is more to it.

    C++ packs options (device third, layout fifth), sizes, whether the input is a tensor subclass, and dtype.
    """
    if packed is None:
        return None
    options, sizes, is_subclass, code = packed
    plain = None if is_subclass else _plain_options(tuple(options), code)
    return None if plain is None else (*plain, tuple(sizes))


@functools.lru_cache(256)
def _plain_options(options: tuple[Any, ...], code: int) -> tuple[torch.dtype, str] | None:
    dtype = _torch.DTYPES.get(code)
    if dtype is None or _packed_metadata(dtype, options[2], ())[0] != options:
        return None
    return dtype, str(options[2])


def _packed_metadata(dtype: torch.dtype, device: torch.device, sizes: Sequence[int]) -> tuple[Any, ...]:
    code = _torch.DTYPE_CODES[dtype]
    return (None, None, device, code, _torch.STRIDED_CODE, None), list(sizes), False, code


_devices: dict[str, torch.device] = {}


def _device(name: str) -> torch.device:
    """Return the device of that name, cached because a validation takes a fraction of a microsecond."""
    device = _devices.get(name)
    if device is None:
        device = _devices[name] = torch.device(name)
    return device


def validate(
    grad: Grad, function: str, index: int, dtype: torch.dtype, device: str, shape: tuple[int, ...]
) -> Grad:
    """The engine's ``validate_outputs`` for the gradient of plain dense input ``index`` of ``function``.

    Gradients that fit, which are almost all, are recognized here, and gradients of a broadcast input are
    reduced here. C++ handles the rest (cast, move, reject).

    Args:
        grad: the gradient.
        function: the name of the autograd node, for the error.
        index: the index of its input.
        dtype: the input's dtype.
        device: the input's device, as text.
        shape: the input's shape.

    Raises:
        RuntimeError: if the gradient does not fit (the engine's error).
    """
    if (
        type(grad) is torch.Tensor
        and grad.dtype is dtype
        and grad.device == _device(device)
        and grad.layout is torch.strided
    ):
        found = grad.shape
        if found == shape:
            return grad
        if len(found) > len(shape) and found[len(found) - len(shape) :] == shape:
            return grad.sum_to_size(shape)
    elif grad is None:
        return None
    # the error names the index, so keep the gradient's position
    metadata = [None] * index + [_packed_metadata(dtype, _device(device), shape)]
    return validate_outputs([None] * index + [grad], function, metadata)[index]


def validate_outputs(grads: Sequence[Grad], function: str, metadata: Sequence[Any]) -> Sequence[Grad]:
    """The engine's ``validate_outputs``: cast, move, reduce or reject gradients that do not fit their inputs.

    Args:
        grads: the gradients of one autograd node.
        function: its name, for the error.
        metadata: one entry per gradient, as C++ packs it (see `plain_metadata`).

    Raises:
        RuntimeError: if a gradient does not fit (the engine's error).
    """
    try:
        return _torch.functional_operators.get("validate_outputs")(grads, metadata)
    except RuntimeError as error:
        text = error_text(error)
        if not text.startswith(_TRACING_PREFIX):
            raise
        raise RuntimeError(f"Function {function} returned an {text.removeprefix(_TRACING_PREFIX)}") from None
