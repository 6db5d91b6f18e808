"""Vary a sample call: other values, numbers, lists, strides and dtypes. `free_sizes` varies single sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fake.library.opcheck.sample_calls import Call, refill, restride, reversed_values

_DIMENSION_NAMES = ("dim", "dims", "axis", "axes")
_LAYOUTS = (
    "row-major",
    "column-major",
    "with gaps",
    "expanded",
    "channels last",
    "with the last two dimensions swapped",
)
# Only within a family: a kernel for floating-point inputs may accept integers by accident.
_DTYPES: dict[str, Callable[[torch.dtype], torch.dtype]] = {
    "float64 for floating point": lambda d: torch.float64 if d.is_floating_point else d,
    "float16 for floating point": lambda d: torch.float16 if d.is_floating_point else d,
    "bfloat16 for floating point": lambda d: torch.bfloat16 if d.is_floating_point else d,
    "float32 for floating point": lambda d: torch.float32 if d.is_floating_point else d,
    "complex128 for complex": lambda d: torch.complex128 if d.is_complex else d,
    "complex64 for complex": lambda d: torch.complex64 if d.is_complex else d,
    "int32 for int64": lambda d: torch.int32 if d is torch.int64 else d,
    "int64 for int32": lambda d: torch.int64 if d is torch.int32 else d,
}


def with_defaults(schema: Any, call: Call) -> Call:
    """Add the defaults of arguments that the call leaves out."""
    positional = [a for a in schema.arguments if not a.kwarg_only]
    args, kwargs = list(call.args), dict(call.kwargs)
    for argument in positional[len(args) :]:
        if argument.name in kwargs or not argument.has_default_value():
            break
        args.append(argument.default_value)
    for argument in schema.arguments:
        if argument.kwarg_only and argument.name not in kwargs and argument.has_default_value():
            kwargs[argument.name] = argument.default_value
    return Call(tuple(args), kwargs, call.label, call.kind, call.names)


def with_equal_lists(call: Call) -> Call | None:
    """Give all tensors of each list the shape of the first; None if that changes nothing.

    Only then can a list be concatenated along any dimension.
    """
    args, changed = list(call.args), False
    for place, argument in enumerate(args):
        if isinstance(argument, (list, tuple)) and argument and isinstance(argument[0], torch.Tensor):
            shapes = {t.shape for t in argument if isinstance(t, torch.Tensor)}
            changed |= len(shapes) > 1
            args[place] = [argument[0].clone() for _ in argument]
    return Call(tuple(args), call.kwargs, call.label, call.kind, call.names) if changed else None


def value_variations(call: Call) -> Iterator[Call]:
    """Yield calls with other values in the same tensors, and with a storage offset. Integers may be indices,
    so they stay within the existing ones."""

    def of_integers(tensor: torch.Tensor) -> bool:
        return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)

    def same_index(tensor: torch.Tensor) -> torch.Tensor:
        return torch.full_like(tensor, int(tensor.flatten()[0]))

    yield call.map(lambda t: restride(t, "with a storage offset"), "inputs with a storage offset", "layout")
    changes: tuple[tuple[str, bool, Callable[[torch.Tensor], torch.Tensor]], ...] = (
        ("all values zero", False, torch.zeros_like),
        ("all values one", False, torch.ones_like),
        ("values reversed", False, reversed_values),
        ("values negated", False, lambda t: t if t.dtype is torch.bool else -t),
        ("large values", False, lambda t: t if t.dtype is torch.bool else 100 * t),
        ("all indices the same", True, same_index),
        ("all integers zero", True, torch.zeros_like),
        ("integers reversed", True, reversed_values),
    )
    for label, integers, change in changes:
        changed = {
            id(t): change(t)
            for t in call.tensors
            if t.layout is torch.strided and of_integers(t) is integers and (t.numel() or not integers)
        }
        yield call.map(lambda t, changed=changed: changed.get(id(t), t), label, "value")  # type: ignore[misc]
    if any(t.dtype is torch.bool for t in call.tensors):
        yield call.map(lambda t: ~t if t.dtype is torch.bool else t, "masks inverted", "value")


def layout_variations(call: Call) -> Iterator[Call]:
    """Yield other strides of all tensors and of each alone. Indices and masks beside floats keep theirs."""
    floating = any(t.is_floating_point() or t.is_complex() for t in call.tensors)
    names = {
        id(t): name
        for t, name in zip(call.tensors, call.tensor_names(), strict=True)
        if t.layout is torch.strided and (not floating or t.is_floating_point() or t.is_complex())
    }
    tensors = [t for t in call.tensors if id(t) in names]
    for kind in _LAYOUTS:
        if all(restride(t, kind).stride() == t.stride() for t in tensors):
            continue
        yield call.map(
            lambda t, kind=kind: restride(t, kind) if id(t) in names else t,  # type: ignore[misc]
            f"inputs {kind}",
            "layout",
        )
        for tensor, name in zip(tensors, names.values(), strict=True) if len(tensors) > 1 else ():
            yield call.map(
                lambda t, one=tensor, kind=kind: restride(t, kind) if t is one else t,  # type: ignore[misc]
                f"{name} {kind}",
                "layout",
            )


def dtype_variations(call: Call) -> Iterator[Call]:
    """Yield calls with other dtypes of the same family in all tensors."""
    for label, change in _DTYPES.items():
        if any(change(t.dtype) is not t.dtype for t in call.tensors):
            yield call.map(lambda t, change=change: t.to(change(t.dtype)), label, "dtype")  # type: ignore[misc]


def number_variations(call: Call, strings: tuple[str, ...] = ()) -> Iterator[Call]:
    """Yield calls with other flags, numbers and strings, absent arguments given, and longer or shorter lists.

    ``strings`` are values to try instead of a string.
    """
    names, rank = call.leaf_names(), max((t.dim() for t in call.tensors), default=0)
    for place, (name, value) in enumerate(zip(names, call.leaves, strict=True)):
        for new in _other_values(name, value, rank, strings):
            yield call.replace_leaves({place: new}, f"{name} = {new!r}", "number")
    for place, argument in enumerate(call.args):
        name = call.names[place] if place < len(call.names) else f"argument {place}"
        for new, label in _other_lists(argument):
            args = (*call.args[:place], new, *call.args[place + 1 :])
            yield Call(args, call.kwargs, f"{name} {label}", "list", call.names)
        if argument is None:
            for given in (t for t in call.tensors if t.is_floating_point()):
                for new in (given, given.reshape(-1)[: given.shape[-1] if given.dim() else 1]):
                    args = (*call.args[:place], new.clone(), *call.args[place + 1 :])
                    yield Call(args, call.kwargs, f"a tensor for {name}", "number", call.names)


def _other_values(name: str, value: Any, rank: int, strings: tuple[str, ...]) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        if name.split("[")[0].split(".")[-1] in _DIMENSION_NAMES:
            return [dim for dim in range(-rank, rank) if dim != value]
        near = dict.fromkeys((value + 1, value - 1, 2 * value, 0, 1))
        return [new for new in near if new != value and new >= min(value, 0)]
    if isinstance(value, float):
        return [
            new for new in dict.fromkeys((-value, value * 0.5, value + 1.0, 0.25, 0.0, 1.0)) if new != value
        ]
    if isinstance(value, str):
        return [new for new in strings if new != value]
    if isinstance(value, torch.dtype):
        others = (torch.float64, torch.float32, torch.float16, torch.int64)
        return [dtype for dtype in others if dtype is not value]
    return []


def _other_lists(argument: Any) -> Iterator[tuple[Any, str]]:
    if not isinstance(argument, (list, tuple)) or not argument:
        return
    elements = list(argument)
    if all(isinstance(element, torch.Tensor) for element in elements):
        yield [*elements, elements[-1].clone()], f"with {len(elements) + 1} tensors"
        for count in {1, len(elements) - 1} - {0, len(elements)}:
            yield elements[:count], f"with {count} tensors"
    elif all(type(element) is int for element in elements) and len(elements) > 1:
        for order in itertools.islice(itertools.permutations(elements), 1, 6):
            if list(order) != elements:
                yield list(order), f"= {list(order)}"


_PRIMES = (7, 11, 13, 17, 19, 23, 29, 31)


def joint_size_variations(call: Call) -> Iterator[Call]:
    """Vary sizes, storage offsets and values of a C++ operator: sizes equal in the sample change together.

    Such a kernel may index without bounds checks, so sizes are not tried one by one, and do not shrink where
    integers may be indices.
    """
    call = call.detached()
    sizes = sorted({s for t in call.tensors for s in t.shape if s > 1})
    larger = {s: s + _PRIMES[i % len(_PRIMES)] for i, s in enumerate(sizes)}
    if sizes:
        yield _resized(call, larger, "all sizes larger")
    may_shrink = all(t.is_floating_point() or t.is_complex() for t in call.tensors)
    for size in sizes:
        yield _resized(call, {size: larger[size]}, f"size {size} → {larger[size]}")
        if may_shrink:
            yield _resized(call, {size: 1}, f"size {size} → 1")
            yield _resized(call, {size: 0}, f"size {size} → 0")
    yield from (
        v
        for v in value_variations(call)
        if not any(word in v.label for word in ("indices", "integers", "masks"))
    )


def _resized(call: Call, sizes: dict[int, int], label: str) -> Call:
    def change(tensor):  # type: ignore[no-untyped-def]
        shape = [sizes.get(size, size) for size in tensor.shape]
        return tensor if shape == list(tensor.shape) else refill(tensor, shape)

    return call.map(change, label, "size")


def code_constants(functions: list[Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return numbers and strings in the code of Python functions and their closures: it may branch there."""
    numbers: dict[int, None] = {}
    strings: dict[str, None] = {}
    pending = list(functions)
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if id(current) in seen or len(seen) > 200:
            continue
        seen.add(id(current))
        if type(current) is int and 2 < current <= 1024:
            numbers[current] = None
        elif isinstance(current, str) and current.isidentifier() and len(current) < 20:
            strings[current] = None
        elif isinstance(current, (tuple, frozenset)):
            pending += current
        elif hasattr(current, "co_consts"):
            pending += current.co_consts
        elif hasattr(current, "__code__"):
            pending.append(current.__code__)
            pending += [cell.cell_contents for cell in current.__closure__ or () if _is_code(cell)]
    return tuple(numbers)[:6], tuple(strings)[:12]


def _is_code(cell: Any) -> bool:
    try:
        content = cell.cell_contents
    except ValueError:  # not filled yet
        return False
    return type(content) is int or hasattr(content, "__code__")
