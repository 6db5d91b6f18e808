"""Arguments of a fast call: which need no conversion, and how the others are passed to the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from fake.seam import library as _torch


class _Missing:
    """Marks an argument that the caller did not pass."""

    def __repr__(self) -> str:
        return "<missing>"


MISSING = _Missing()
PLAIN = (torch.Tensor, torch.nn.Parameter)
INT_MIN, INT_MAX = -(2**63), 2**63


class FastCallable(Protocol):
    """The attributes of a custom operator that its fast call reads."""

    differentiable: bool
    _argument_types: dict[str, tuple[str, bool]]
    _positional_names: list[str]
    _python_defaults: dict[str, Any]
    _returns_one_tuple: bool
    _name: Any
    _opoverload: Any
    _backward_fn: Any
    _setup_context_fn: Any

    @property
    def qualname(self) -> str: ...

    @property
    def has_disabled_kernels(self) -> bool: ...

    def kernel_for(self, device_type: str) -> Callable[..., Any] | None: ...


def call_dispatcher(
    op: FastCallable,
    values: tuple[Any, ...],
    keywords: dict[str, Any],
    extra: tuple[Any, ...],
    unknown: dict[str, Any],
) -> Any:
    """Call the dispatcher's operator with exactly what the caller passed.

    An argument counts as left out if it is `MISSING` or identical to its default.

    Args:
        op: the operator.
        values: values of the schema's positional arguments, in schema order.
        keywords: values of its keyword-only arguments.
        extra: surplus positional values, which the dispatcher will refuse.
        unknown: unknown keyword arguments, which the dispatcher will refuse.

    Returns:
        The operator's result.
    """
    defaults = op._python_defaults
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    skipped = False
    for name, value in zip(op._positional_names, values, strict=True):
        if value is MISSING or (not extra and name in defaults and value is defaults[name]):
            skipped = True
        elif skipped:
            kwargs[name] = value
        else:
            args.append(value)
    for name, value in keywords.items():
        if value is not MISSING and not (name in defaults and value is defaults[name]):
            kwargs[name] = value
    return op._opoverload(*args, *extra, **kwargs, **unknown)


# --- argument checks: source text that leaves the fast path with `return SLOW` -----------------------
def plain_list(values: Any, key: int) -> list[torch.Tensor] | None:
    """Return a copy of a list of plain tensors that all have this dispatch keyset, or None."""
    if type(values) is not list and type(values) is not tuple:
        return None
    for value in values:
        if type(value) not in PLAIN or _torch.dispatch_keys(value).raw_repr() != key:
            return None
    return list(values)


def _int_list(values: Any) -> list[int] | None:
    if type(values) is not list and type(values) is not tuple:
        return None
    for value in values:
        if type(value) is not int or not INT_MIN <= value < INT_MAX:
            return None
    return list(values)


def _typed_list(kind: type) -> Callable[[Any], list[Any] | None]:
    def convert(values: Any) -> list[Any] | None:
        if type(values) is not list and type(values) is not tuple:
            return None
        for value in values:
            if type(value) is not kind:
                return None
        return list(values)

    return convert


SCALAR_TESTS = {
    "int": "type({0}) is int and _INT_MIN <= {0} < _INT_MAX",
    "float": "type({0}) is float",
    "bool": "type({0}) is bool",
    "str": "type({0}) is str",
    "number": "type({0}) is float or type({0}) is bool or (type({0}) is int and _INT_MIN <= {0} < _INT_MAX)",
    "Device": "type({0}) is _device",
}
LISTS = {
    "List[int]": ("_int_list", _int_list),
    "List[float]": ("_float_list", _typed_list(float)),
    "List[bool]": ("_bool_list", _typed_list(bool)),
    "List[str]": ("_str_list", _typed_list(str)),
}


def argument_type(argument: Any) -> tuple[str, bool]:
    """Return the type of a schema argument, and whether it is optional.

    ``type`` reports every enumeration as int; ``real_type`` distinguishes dtypes (and
    SymInt, which takes the same values).
    """
    kind = str(argument.type)
    if kind.removeprefix("Optional[").startswith("int"):
        kind = str(argument.real_type).replace("SymInt", "int")
    optional = kind.startswith("Optional[")
    return (kind[len("Optional[") : -1] if optional else kind), optional


def any_requires_grad(tensors: list[torch.Tensor] | None) -> bool:
    """Return whether any tensor of a list (or None) requires a gradient."""
    return tensors is not None and any(t.requires_grad for t in tensors)
