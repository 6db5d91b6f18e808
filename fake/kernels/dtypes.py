"""Find the combinations of dtypes that eager's CPU kernels refuse, by trial (:mod:`fake.kernels.trials`)."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fake.kernels.outputs import dtype_name
from fake.kernels.trials import TensorSpec, Trial, attempt, key_of, trial_of
from fake.seam.dispatch import OpOverload, no_dispatch

_DTYPE_ERROR = re.compile(
    r"not implemented for|dtype|scalar ?type|data ?type|types?\b|tensors? as indices|complex|bool|floating|integ|"
    r"long|half|float|double|can't be cast|not supported",
    re.IGNORECASE,
)
_VALUE_ERROR = re.compile("overflow|negative integer|out of range|out of bounds|singular|size", re.IGNORECASE)
_MAX_ACCEPTED = 10_000
_accepted: dict[Any, None] = {}
"""Keys of calls that eager accepts. Refused calls are tried again, each with its own sizes."""


def refusal(func: OpOverload, args: Any, kwargs: Any) -> Exception | None:
    """Return eager's error for these dtypes, or ``None`` if eager accepts them or cannot be tried.

    Args:
        func: the operator.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    key = key_of(func, args, kwargs)
    if key in _accepted:
        return None
    trial = trial_of(func, args, kwargs)
    if trial is None:
        return None
    error = _try_dtypes(trial)
    if error is None:
        if len(_accepted) >= _MAX_ACCEPTED:
            _accepted.clear()
        _accepted[key] = None
    return error


def _try_dtypes(trial: Trial) -> Exception | None:
    for fill in trial.fills():
        error = attempt(trial, fill)
        if error is None:
            return None
        if _is_dtype_error(trial.func, str(error)):
            accepted_dtypes = next(
                (text for text, other in _with_other_dtypes(trial) if attempt(other, fill) is None), ""
            )
            if accepted_dtypes:
                first = str(error).strip().partition("\n")[0]
                text = f"eager's kernel does not take {_dtypes_text(trial)}; it takes {accepted_dtypes} ({first})"
                return type(error)(f"{trial.func} on cpu: {text}")
    return None


def _is_dtype_error(func: OpOverload, message: str) -> bool:
    """Return whether dtypes may be the cause. Elementwise casts to ``out`` have their own rule."""
    if _VALUE_ERROR.search(message) or not _DTYPE_ERROR.search(message):
        return False
    return torch.Tag.pointwise not in func.tags or "can't be cast" not in message


def _with_other_dtypes(trial: Trial) -> Iterator[tuple[str, Trial]]:
    """Yield the call in other dtypes, with a description: if eager accepts one, the dtypes were at fault."""
    names = [n for n, v in trial.values.items() if isinstance(v, TensorSpec | torch.dtype | float | complex)]
    names += [n for n in trial.tensors() if n not in names]
    for name in names:
        for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64):
            yield f"{name} as {dtype_name(dtype)}", trial.in_dtype(dtype, [name])
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64):
        yield f"all as {dtype_name(dtype)}", trial.in_dtype(dtype, names)
    kinds = {n: v.dtype for n, v in trial.values.items() if isinstance(v, TensorSpec)}
    for tried in dict.fromkeys(kinds.values()):
        same_dtype = [n for n, dtype in kinds.items() if dtype is tried]
        if 1 < len(same_dtype) < len(kinds):
            yield f"{' and '.join(same_dtype)} as float32", trial.in_dtype(torch.float32, same_dtype)
    for one, more in ((torch.float32, torch.int64), (torch.int64, torch.float32)):
        yield (
            f"{names[0]} as {dtype_name(one)}, the others as {dtype_name(more)}",
            trial.in_dtype(more, names[1:]).in_dtype(one, names[:1]),
        )


def _dtypes_text(trial: Trial) -> str:
    parts = []
    for name, value in trial.values.items():
        kinds = value if isinstance(value, tuple) else (value,)
        dtypes = [
            dtype_name(k.dtype if isinstance(k, TensorSpec) else k)
            for k in kinds
            if isinstance(k, TensorSpec | torch.dtype)
        ]
        if dtypes:
            parts.append(f"{'/'.join(dict.fromkeys(dtypes))} ({name})")
        elif type(value) in (bool, int, float, complex):
            parts.append(f"{value} ({name})")
    return ", ".join(parts)


def result_type(operands: Sequence[Any]) -> torch.dtype:
    """Return the dtype that all operands (tensors and numbers) promote to. No mode sees a call."""
    return _result_type(
        tuple((o.dtype, o.dim() > 0) if isinstance(o, torch.Tensor) else type(o) for o in operands)
    )


@functools.cache
def _result_type(kinds: tuple[Any, ...]) -> torch.dtype:
    with no_dispatch():
        stand_ins = [k() if isinstance(k, type) else torch.ones((1,) * k[1], dtype=k[0]) for k in kinds]
        dtypes = [torch.result_type(stand_ins[0], other) for other in stand_ins]
    return functools.reduce(torch.promote_types, dtypes)
