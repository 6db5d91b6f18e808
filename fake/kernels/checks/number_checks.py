"""Checks of numbers that eager converts to another dtype."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch

from fake.kernels.checks.check_registry import OpOverload, check_for, is_refused, refuse
from fake.kernels.dtypes import result_type
from fake.seam.dispatch import no_dispatch

#: Numbers that eager converts to the dtype of the result, by operator, even if there are no elements. See
#: ``_CONVERTED_IF_ANY`` for those that it converts only if there are elements.
_CONVERTED = {
    ("fill", "fill_", "masked_fill", "masked_fill_", "constant_pad_nd"): ("value",),
    ("full", "full_like", "new_full"): ("fill_value",),
    ("scalar_tensor",): ("s",),
    ("addcmul", "addcmul_", "addcdiv", "addcdiv_"): ("value",),
    ("lerp", "lerp_"): ("weight",),
    ("threshold", "threshold_"): ("threshold", "value"),
    ("softplus",): ("beta", "threshold"),
    ("add", "add_", "sub", "sub_", "rsub"): ("alpha",),
    ("pow", "pow_"): ("exponent",),
    ("hardshrink",): ("lambd",),
    ("elu", "elu_"): ("alpha",),
    ("celu", "celu_"): ("alpha",),
    ("leaky_relu", "leaky_relu_"): ("negative_slope",),
    ("_unsafe_masked_index",): ("fill",),
    ("hardtanh", "hardtanh_"): ("min_val", "max_val"),
    ("index_add", "index_add_"): ("alpha",),
    ("segment_reduce",): ("initial",),
    ("rrelu_with_noise", "rrelu_with_noise_"): ("lower", "upper"),
    ("histc",): ("min", "max"),
    ("clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_"): ("min", "max"),
}
_IN_SINGLE_PRECISION = frozenset(
    ("addbmm", "addcdiv", "addcmul", "addmm", "baddbmm", "celu", "elu", "leaky_relu", "lerp", "softplus")
)
"""Operators that use float32 numbers in low precision, so that only the result can fail to hold them."""

_CONVERTED_IF_ANY = {
    ("scatter", "scatter_", "index_fill", "index_fill_"): ("value",),
    ("addmm", "addmm_", "addbmm", "addbmm_", "baddbmm", "baddbmm_", "addmv", "addmv_", "addr", "addr_"): ("beta", "alpha"),
}  # fmt: skip
_CONVERTED_NAMES_IF_ANY = frozenset(name for names in _CONVERTED_IF_ANY for name in names)

_NOT_CONVERTED = frozenset(
    f"{name}{suffix}"
    for name in ("pow", "clamp", "clamp_min", "clamp_max", "add", "sub", "rsub", "index_fill")
    for suffix in ("", "_")
)
"""Operators whose result becomes complex with a complex number, or that refuse any complex number."""

_ONLY_CONVERTED = {
    ("arange",): ("start", "end", "step"),
    ("softshrink",): ("lambd",),
    ("elu", "elu_"): ("scale", "input_scale"),
}
"""Numbers that are converted and never refused for their size (or only by another check)."""


_ALPHA_OF_OWN_DTYPE = (torch.ops.aten.index_add.default, torch.ops.aten.index_add_.default)
"""Operators whose Python versions in torch require an integer for integer tensors, where eager truncates."""


@functools.cache
def _converted_by(func: OpOverload) -> frozenset[str]:
    """Return the arguments that eager converts to the dtype of the tensors, whatever the number."""
    if func.namespace != "aten":
        return frozenset()
    name = func._schema.name.split("::")[1]
    found: set[str] = set()
    for names, arguments in (*_CONVERTED.items(), *_CONVERTED_IF_ANY.items(), *_ONLY_CONVERTED.items()):
        if name in names and name not in _NOT_CONVERTED:
            found.update(arguments)
    return frozenset(found)


def convert_scalar_arguments(func: OpOverload, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Convert numbers in the arguments as eager does before it uses them.

    Complex numbers without an imaginary part become real, and numbers that eager truncates become integers.

    Args:
        func: the operator.
        args: its positional arguments.
        kwargs: its keyword arguments.

    >>> convert_scalar_arguments(torch.ops.aten.masked_fill.Scalar, (None, None, 2 + 0j), {})
    ((None, None, 2.0), {})
    """
    converted = _converted_by(func)
    if func._schema.name == "aten::full" and kwargs.get("dtype") is None and kwargs.get("out") is None:
        return args, kwargs  # the number determines the dtype
    if func._schema.name in ("aten::clamp", "aten::clamp_") and args[0].is_floating_point():
        converted = frozenset(("min", "max"))
    names = [argument.name for argument in func._schema.arguments]

    def convert(name: str, value: Any) -> Any:
        if name not in converted:
            return value
        if isinstance(value, complex) and value.imag == 0:
            value = value.real
        truncated = func in _ALPHA_OF_OWN_DTYPE and isinstance(value, float) and math.isfinite(value)
        return (
            int(value)
            if truncated and not args[0].is_floating_point() and not args[0].is_complex()
            else value
        )

    return (
        tuple(convert(name, value) for name, value in zip(names, args, strict=False)),
        {name: convert(name, value) for name, value in kwargs.items()},
    )


def _numbers(func: OpOverload, bound: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    name = func._schema.name.split("::")[1]
    for names, arguments in {**_CONVERTED, **_CONVERTED_IF_ANY}.items():
        if name in names:
            yield from (
                (a, bound[a]) for a in arguments if isinstance(bound.get(a), bool | int | float | complex)
            )


def _is_refused(func: OpOverload, bound: dict[str, Any], argument: str, dtype: torch.dtype) -> bool:
    """Return whether eager refuses to convert a number to ``dtype``."""
    value, name = bound[argument], func._schema.name.split("::")[1]
    if name in _CONVERTED_NAMES_IF_ANY and any(
        value.numel() == 0 for value in bound.values() if isinstance(value, torch.Tensor)
    ):
        return False  # the number is not used
    if dtype is torch.complex32 and name.startswith(("fill", "full", "new_full")):
        dtype = torch.complex64  # values beyond the range of float16 become infinite
    integral = type(value) is int and dtype is not torch.bool and not dtype.is_floating_point
    if _is_clamp(func) and integral and not is_refused(_wide_bound):
        ends = torch.iinfo(dtype)  # a bound that no value can pass has no effect
        return value > ends.max if argument == "min" else value < ends.min
    if name.startswith("hardtanh") and isinstance(value, float) and not overflows(value, torch.int64):
        value = value if dtype.is_floating_point else int(value)  # integer tensors truncate bounds first
    return overflows(_converted_number(func, value), dtype)


def _wide_bound() -> torch.Tensor:
    return torch.clamp(torch.ones(1, dtype=torch.uint8), max=300)


@check_for(*{name for table in (_CONVERTED, _CONVERTED_IF_ANY) for names in table for name in names})
def check_scalars_fit_dtype(func: OpOverload, bound: dict[str, Any]) -> None:
    """A number must fit in the dtype that it is converted to (c10's checked conversion)."""
    numbers = list(_numbers(func, bound))
    values = [value for _, value in numbers]
    dtype = _compute_dtype(func, bound, values) if numbers else None
    if dtype is not None and not (_is_clamp(func) and any(value != value for value in values)):
        for name, value in numbers:
            refuse(
                _is_refused(func, bound, name, dtype), func,
                f"value {value!r} of argument {name!r} cannot be converted to type {dtype} without overflow",
            )  # fmt: skip


def _compute_dtype(func: OpOverload, bound: dict[str, Any], numbers: list[Any]) -> torch.dtype | None:
    """Return the dtype that numbers are converted to. For clamp and pow, numbers take part in promotion."""
    name = func._schema.name.split("::")[1].rstrip("_")
    if name == "scalar_tensor":
        dtype = bound.get("dtype") or torch.get_default_dtype()
        return torch.float64 if dtype in _LOW_PRECISION else dtype
    if name == "full":
        return bound["out"].dtype if bound.get("out") is not None else bound["dtype"] or result_type(numbers)
    if name in ("full_like", "new_full"):
        return bound.get("dtype") or bound["self"].dtype
    if name in (
        "_unsafe_masked_index",
        "fill",
        "masked_fill",
        "constant_pad_nd",
        "scatter",
        "index_fill",
        "threshold",
    ):
        return bound["self"].dtype
    tensors = [value for key, value in bound.items() if isinstance(value, torch.Tensor) and key != "out"]
    operands = [*tensors, *(numbers if _is_clamp(func) or name == "pow" else ())]
    if not operands:
        return None  # a symbolic number stands in for a tensor
    dtype = result_type(operands)
    if name == "pow" and dtype not in _LOW_PRECISION and (dtype.is_floating_point or dtype.is_complex):
        return None
    return torch.float32 if name in _IN_SINGLE_PRECISION and dtype in _LOW_PRECISION else dtype


def _converted_number(func: OpOverload, value: Any) -> Any:
    """Return the number that is converted: subtraction negates it (the least integer stays itself)."""
    if func._schema.name not in ("aten::sub", "aten::sub_", "aten::rsub") or value in (True, -(2**63)):
        return value
    return -value


def _is_clamp(func: OpOverload) -> bool:
    """Return whether this is a clamp, for which a NaN bound makes the result NaN."""
    return func._schema.name.startswith("aten::clamp")


_LOW_PRECISION = frozenset((torch.float16, torch.bfloat16))


def overflows(value: Any, dtype: torch.dtype) -> bool:
    """Return whether c10 refuses to convert a number: complex to real, or out of range. Truncation passes.

    Negative integers wrap around in unsigned dtypes; other negative numbers do not.

    >>> overflows(300, torch.uint8), overflows(-1, torch.uint8), overflows(-1.0, torch.uint8), overflows(2.5, torch.int8)
    (True, False, True, False)
    """
    if dtype.is_complex:
        part = dtype.to_real()
        return any(overflows(n, part) for n in (value.real, value.imag))
    if isinstance(value, complex):
        if value.imag != 0:
            return dtype is not torch.bool
        value = value.real
    if dtype is torch.bool or isinstance(value, bool):
        return False
    if dtype.is_floating_point:
        return math.isfinite(value) and abs(value) > torch.finfo(dtype).max
    if isinstance(value, float) and not math.isfinite(value):
        return True
    info, kind = (torch.iinfo(dtype), type(value))  # C++ converts the limits to the number's type
    lowest = -info.max if info.min == 0 and isinstance(value, int) else info.min
    return not kind(lowest) <= value <= kind(info.max)


@check_for("index_fill")
def check_index_fill_value(func: OpOverload, bound: dict[str, Any]) -> None:
    """A complex number needs a complex tensor, even if its imaginary part is 0."""
    refuse(
        isinstance(bound["value"], complex) and not bound["self"].is_complex(), func,
        "Converting complex Scalar to non-complex type is not supported (argument 'value')",
    )  # fmt: skip


@check_for("xlogy", "bucketize", "searchsorted")
def check_scalar_is_real(func: OpOverload, bound: dict[str, Any]) -> None:
    """These kernels do not support complex numbers, nor promote to them."""
    for name in ("self", "other"):
        if isinstance(bound.get(name), complex):
            refuse(
                True, func, f"not implemented for complex numbers (argument {name!r})", NotImplementedError
            )


@check_for("linspace", "logspace")
def check_range_ends_fit_dtype(func: OpOverload, bound: dict[str, Any]) -> None:
    """Both ends must fit in the dtype of the result; for a single step, only the number that is written."""
    start, end, steps = bound["start"], bound["end"], bound["steps"]
    if type(steps) is not int or steps < 1:
        return
    out = bound.get("out")
    dtype = bound.get("dtype") or torch.get_default_dtype() if out is None else out.dtype
    ends = [end for end in (start, end)[:steps] if type(end) in (bool, int, float)]
    if steps == 1 and ends and func._schema.name == "aten::logspace":
        ends = [_power(float(bound["base"]), start)]
    for value in ends:
        refuse(
            overflows(value, dtype), func,
            f"value {value!r} cannot be converted to type {dtype} without overflow (arguments 'start' and 'end')",
        )  # fmt: skip


def _power(base: float, exponent: float) -> float:
    """Compute ``std::pow``, which returns a number where Python raises."""
    with no_dispatch():
        return torch.tensor(base, dtype=torch.float64).pow(exponent).item()


@check_for("histc")
def check_histc_range(func: OpOverload, bound: dict[str, Any]) -> None:
    """The range of a histogram must be finite."""
    low, high = bound["min"], bound["max"]
    if all(type(n) in (bool, int, float) for n in (low, high)):
        refuse(
            not (math.isfinite(low) and math.isfinite(high)), func,
            f"torch.histc: range of [{low}, {high}] is not finite (arguments 'min' and 'max')",
        )  # fmt: skip


@check_for("uniform")
def check_uniform_range(func: OpOverload, bound: dict[str, Any]) -> None:
    """Both ends and their difference must be finite in the dtype, and the ends in order."""
    low, high, dtype = bound["from"], bound["to"], bound["self"].dtype
    if not all(type(n) in (bool, int, float) for n in (low, high)) or not dtype.is_floating_point:
        return
    greatest = torch.finfo(dtype).max
    for name, value in (("from", low), ("to", high)):
        refuse(not abs(value) <= greatest, func, f"{name} is out of bounds for {dtype}, but got {value}")
    refuse(
        low > high, func,
        f"uniform_ expects to return a [from, to) range, but found from={low} > to={high}",
    )  # fmt: skip
    refuse(
        high - low > greatest, func,
        f"uniform_ expects to-from <= the largest {dtype}, but found to={high} and from={low}",
    )  # fmt: skip


@check_for("random", "randint", "randint_like")
def check_random_range(func: OpOverload, bound: dict[str, Any]) -> None:
    """The range must not be empty, and the dtype must hold the smallest and the largest number in it."""
    low, high = bound.get("from", bound.get("low", 0)), bound.get("to", bound.get("high"))
    if not isinstance(low, int | torch.SymInt) or not isinstance(high, int | torch.SymInt):
        return
    refuse(
        low >= high, func,
        f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}",
    )  # fmt: skip
    dtype = bound.get("dtype")
    if not isinstance(dtype, torch.dtype):  # the default is a number in ``randint``'s schema, None in others
        dtype = bound["self"].dtype if "self" in bound else torch.int64
    limits: tuple[float, float] = (0, 1)
    if dtype is not torch.bool:
        kind = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        limits = (kind.min, kind.max)
    for name, value in (("from", low), ("to - 1", high - 1)):
        if isinstance(value, int):  # sizes fit in any dtype of indices
            refuse(not limits[0] <= value <= limits[1], func, f"{name} is out of bounds for {dtype}")


@check_for("_scaled_dot_product_flash_attention_for_cpu")
def check_no_dropout(func: OpOverload, bound: dict[str, Any]) -> None:
    """The CPU kernel does not support dropout."""
    dropout = bound["dropout_p"]
    refuse(
        dropout != 0.0, func, f"currently does not support dropout > 0 (argument 'dropout_p' is {dropout})"
    )


@check_for("_softmax", "_log_softmax")
def check_softmax_dtype(func: OpOverload, bound: dict[str, Any]) -> None:
    """Only GPU kernels convert the dtype."""
    refuse(
        bound["half_to_float"] and bound["self"].device.type == "cpu", func,
        "softmax with half to float conversion is not supported on CPU (argument 'half_to_float')",
    )  # fmt: skip


@check_for("frexp")
def check_frexp_exponents(func: OpOverload, bound: dict[str, Any]) -> None:
    """Exponents must be int32 in releases whose kernel does not cast them."""
    exponents = bound.get("exponent")
    refuse(
        exponents is not None and exponents.dtype is not torch.int32 and is_refused(_wide_exponents), func,
        f"expects exponent to have dtype torch.int32 but got {None if exponents is None else exponents.dtype}",
    )  # fmt: skip


def _wide_exponents() -> Any:
    return torch.frexp(torch.ones(1), out=(torch.ones(1), torch.ones(1, dtype=torch.int64)))
