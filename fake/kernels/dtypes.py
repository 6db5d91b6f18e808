"""Which combinations of dtypes eager's CPU kernels refuse: a table measured with eager itself.

No schema and no meta kernel says that ``exp`` knows no bfloat16 on some backend or that ``mm`` wants one dtype: each
kernel decides for itself, with a macro over dtypes or a check of its own. ``refused_dtypes.json`` holds what they
decided, for every ATen operator that torch's ``op_db`` reaches. ``python -m benchmarks.conformance --measure FILE`` writes it:
it calls the operators on tensors of all dtypes and keeps the combinations that were always refused. A combination
that was not measured, another device, and another release of torch are left to the other steps.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import torch

from fake.kernels._torch import OpOverload, no_dispatch

__all__ = ["CODES", "FILE", "Refused", "Signature", "refusal", "result_type", "signature", "table", "written"]

Signature = dict[str, str]

EMPTY = "~"
"""The key under which a signature says that a tensor has no elements."""

FILE = "refused_dtypes.json"

_SHORT = {
    torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64",
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
    torch.bool: "b", torch.complex32: "c32", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip
CODES = frozenset(_SHORT.values())
"""How the table writes dtypes."""

_LONG = {short: str(dtype).removeprefix("torch.") for dtype, short in _SHORT.items()}
_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (NotImplementedError, RuntimeError, IndexError, TypeError, ValueError)
}


def signature(func: OpOverload, args: Any, kwargs: Any) -> Signature | None:
    """What a kernel may look at when it decides whether it takes dtypes, by argument: the dtype of a tensor (with a
    dot if it has no dimension), the type of a number, a dtype or a string itself; ``None`` for a call that the table
    knows nothing about (a tensor on another device or of another layout). Kernels often let empty tensors pass; they are marked.

    >>> x = torch.zeros(2, dtype=torch.int64)
    >>> signature(torch.ops.aten.add.Tensor, (x, torch.ones(())), {"alpha": 2})
    {'self': 'i64', 'other': 'f32.', 'alpha': 'int'}
    """
    parts = {}
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        part = "" if value is None else _part(value, str(argument.type))
        if part is None:
            return None
        if part and argument.name == "dtype" and func._schema.name.endswith("_like"):
            parts["self"] = part  # what is made has this dtype; the template's does not matter
        elif part:
            parts[argument.name] = part.rstrip("~")
            if part.endswith("~"):
                parts[EMPTY] = "yes"
    return parts


def _part(value: Any, kind: str) -> str | None:
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or value.layout is not torch.strided or value.dtype not in _SHORT:
            return None
        if value._has_symbolic_sizes_strides or value.is_nested:
            return None
        return _SHORT[value.dtype] + ("" if value.dim() else ".") + ("" if value.numel() else "~")
    if isinstance(value, torch.dtype):
        return _SHORT.get(value)
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, list | tuple) and "Tensor" in kind:
        inner = [_part(item, "Tensor") for item in value]
        if None in inner:
            return None
        parts = sorted({part.rstrip("~") for part in inner if part})
        return f"[{','.join(parts)}]" + ("~" if any(part and part.endswith("~") for part in inner) else "")
    if "number" in kind and isinstance(value, bool | int | float | complex):
        return type(value).__name__
    return ""


@dataclass(frozen=True)
class Refused:
    """What is known of one operator. Each refusal has the name of its error.

    Attributes:
        same: pairs of arguments that must have one dtype.
        same_if_empty, never_if_empty: the same for calls in which a tensor has no elements.
        never: for an argument, dtypes that it must not have, whatever the others have.
        together: signatures that are refused although no argument alone is to blame, or with another error than the pair's.
    """

    same: tuple[tuple[str, str, str], ...] = ()
    same_if_empty: tuple[tuple[str, str, str], ...] = ()
    never: dict[str, dict[str, str]] = field(default_factory=dict)
    never_if_empty: dict[str, dict[str, str]] = field(default_factory=dict)
    together: dict[str, str] = field(default_factory=dict)

    def find(self, found: Signature) -> tuple[str, str] | None:
        """The error's name for a signature, and what is wrong; ``None`` if nothing is."""
        empty = EMPTY in found
        error = "" if empty else self.together.get(written(found), "")
        if error:
            return error, f"no kernel for {_said(found, *found)}"
        for first, second, error in self.same_if_empty if empty else self.same:
            if first in found and second in found and found[first].rstrip(".") != found[second].rstrip("."):
                return (
                    error,
                    f"{first} and {second} must have the same dtype, but have {_said(found, first, second)}",
                )
        never = self.never_if_empty if empty else self.never
        for name, part in found.items():
            error = _error_for(never.get(name, {}), part.rstrip("."))
            if error:
                return error, f"{name} must not have the dtype {_LONG.get(part.rstrip('.'), part)}"
        return None


_LIKE = {"c128": ("c64",), "i8": ("i32", "u8"), "i16": ("i32", "u8")}
"""Dtypes that are not measured, and those that speak for them if they are all refused."""


def _error_for(refused: dict[str, str], code: str) -> str:
    """The error's name for a dtype, or an empty string."""
    if code in _LIKE and all(other in refused for other in _LIKE[code]):
        return refused[_LIKE[code][0]]
    return refused.get(code, "")


def written(found: Signature) -> str:
    """A signature as the table writes it.

    >>> written({"self": "f32", "other": "i64."})
    'self=f32 other=i64.'
    """
    return " ".join(f"{name}={part}" for name, part in found.items())


def _said(found: Signature, *names: str) -> str:
    return ", ".join(f"{_LONG.get(found[name].rstrip('.'), found[name])} ({name})" for name in names)


@functools.cache
def _measured() -> dict[str, Any]:
    file = resources.files("fake.kernels") / FILE
    data = json.loads(file.read_text()) if file.is_file() else {}
    return data if data.get("torch") == torch.__version__.split("+")[0] else {}


def table(kind: str) -> dict[str, Any]:
    """One part of what was measured, by operator: ``"operators"`` (dtypes) or ``"overlaps"``. Empty for another torch."""
    return _measured().get(kind, {})


@functools.cache
def _refused_by(func: OpOverload) -> Refused | None:
    """What an operator refuses. One that takes a number is asked as if it took a tensor, if only that was measured."""
    row = table("operators").get(func.name())
    if row is None and func._overloadname == "Scalar":
        row = table("operators").get(f"{func._schema.name}.Tensor")
    return None if row is None else _refused(row)


_MEASURED = frozenset(("b", "bf16", "c64", "f16", "f32", "f64", "i32", "i64", "u8"))
"""The dtypes in which each argument was tried."""


def _refused(row: dict[str, Any]) -> Refused:
    pairs = {key: tuple(map(tuple, row.get(key, ()))) for key in ("same", "same_if_empty")}
    never = {
        key: {name: codes for name, codes in row.get(key, {}).items() if _MEASURED - codes.keys()}
        for key in ("never", "never_if_empty")  # what is refused in all dtypes is not refused for its dtype
    }
    return Refused(**pairs, **never, together=row.get("together", {}))  # type: ignore[arg-type]


def result_type(operands: Sequence[Any]) -> torch.dtype:
    """The dtype that the first operand and all others promote to (tensors and numbers); no mode sees a call."""
    return _result_type(
        tuple((o.dtype, o.dim() > 0) if isinstance(o, torch.Tensor) else type(o) for o in operands)
    )


@functools.cache
def _result_type(kinds: tuple[Any, ...]) -> torch.dtype:
    with no_dispatch():
        stand_ins = [k() if isinstance(k, type) else torch.ones((1,) * k[1], dtype=k[0]) for k in kinds]
        dtypes = [torch.result_type(stand_ins[0], other) for other in stand_ins]
    return functools.reduce(torch.promote_types, dtypes)


def _in_common_dtype(func: OpOverload, found: Signature, args: Any, kwargs: Any) -> Signature | None:
    """The signature after type promotion: an elementwise kernel is chosen by the dtype that all operands are converted to."""
    operands = [
        a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor | bool | int | float | complex)
    ]
    names = [
        n
        for n, part in found.items()
        if part.rstrip(".") in CODES and n not in ("dtype", "condition", "mask")
    ]
    numbers = [a for a in operands if not isinstance(a, torch.Tensor)]
    if len(names) + len(numbers) != 2 or len(operands) != 2:
        return None
    common = _SHORT.get(result_type(operands))
    if common is None:
        return None
    changed = {name: common if name in names else part for name, part in found.items()}
    return None if changed == found else changed


def refusal(func: OpOverload, args: Any, kwargs: Any) -> Exception | None:
    """The error with which eager's kernel refuses these dtypes, or ``None`` if it takes them or was never asked."""
    refused = _refused_by(func)
    found = None if refused is None else signature(func, args, kwargs)
    if refused is None or found is None:
        return None
    problem = refused.find(found)
    if problem is None and torch.Tag.pointwise in func.tags and not func._schema.is_mutable:
        common = _in_common_dtype(func, found, args, kwargs)
        problem = None if common is None else refused.find(common)
    return None if problem is None else _ERRORS[problem[0]](f"{func} on cpu: {problem[1]}")
