"""The parameters of an operator as Python sees them: names, defaults, and which are keyword-only."""

from __future__ import annotations

import enum
import inspect
import keyword
import math
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from typing import Any

import torch

from fake.library.signatures import signature_of
from fake.seam import library as _torch


def signature_for(op: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a fake kernel of ``op``, or None if only the kernel knows it."""
    layout = getattr(op, "layout", None)
    if layout is not None:
        return layout.signature
    overload = getattr(op, "_opoverload", op)
    if isinstance(overload, _torch.OpOverload):
        return _schema_signature(overload._schema, getattr(op, "_python_defaults", {}))
    signature = signature_of(op)
    if signature is None:
        return None
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return signature if all(p.kind in kinds for p in signature.parameters.values()) else None


def _schema_signature(schema: Any, python_defaults: Mapping[str, Any]) -> inspect.Signature:
    parameters = []
    for argument in schema.arguments:
        default: Any = Parameter.empty
        if argument.name in python_defaults:
            default = python_defaults[argument.name]
        elif argument.has_default_value():
            default = argument.default_value
            if str(argument.type) in _STORED_AS_NUMBERS and isinstance(default, int):
                default = _Unprintable(default)
        kind = Parameter.KEYWORD_ONLY if argument.kwarg_only else Parameter.POSITIONAL_OR_KEYWORD
        # A parameter's name cannot be a Python keyword; one with an underscore is accepted instead.
        name = f"_{argument.name}" if keyword.iskeyword(argument.name) else argument.name
        parameters.append(Parameter(name, kind, default=default))
    return inspect.Signature(parameters)


#: Schema types whose defaults are stored as integers that mean nothing to Python.
_STORED_AS_NUMBERS = ("ScalarType", "Layout", "MemoryFormat", "Optional[ScalarType]", "Optional[Layout]")


class _Unprintable(int):
    """A default that cannot be written in Python, and that this package does not pass either."""


def fill_defaults(
    signature: inspect.Signature | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add the defaults that the call leaves out, as far as they are known.

    Args:
        signature: the operator's parameters, or None.
        args: positional arguments.
        kwargs: keyword arguments.

    Returns:
        Positional and keyword arguments.
    """
    if signature is None:
        return tuple(args), dict(kwargs)
    filled, named = list(args), dict(kwargs)
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
    for parameter in positional[len(filled) :]:
        if parameter.name in named or not _is_known_default(parameter.default):
            break
        filled.append(parameter.default)
    for parameter in parameters:
        if parameter.kind is Parameter.KEYWORD_ONLY and _is_known_default(parameter.default):
            named.setdefault(parameter.name, parameter.default)
    return tuple(filled), named


def _is_known_default(default: Any) -> bool:
    return default is not Parameter.empty and not isinstance(default, _Unprintable)


def literal(value: Any) -> str | None:
    """Return a self-contained expression for the value, or None if there is none."""
    if isinstance(value, _Unprintable):
        return None
    if isinstance(value, enum.Enum):
        return None if "<" in type(value).__qualname__ else f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, complex):
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    if isinstance(value, (list, tuple)):
        inner = [literal(element) for element in value]
        if any(element is None for element in inner):
            return None
        text = ", ".join(str(element) for element in inner)
        return f"[{text}]" if isinstance(value, list) else f"({text}{',' if len(inner) == 1 else ''})"
    plain = value is None or isinstance(value, (bool, int, float, str, torch.dtype))
    return repr(value) if plain or isinstance(value, (torch.layout, torch.memory_format)) else None


def signature_text(signature: inspect.Signature) -> str:
    """Return the parameters as text, as written between the parentheses of a definition.

    Defaults that cannot be written are left out, along with those of preceding positional parameters: the
    operator passes its own.
    """
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
    bare = [i for i, p in enumerate(positional) if p.default is Parameter.empty or literal(p.default) is None]
    first_default = max(bare, default=-1) + 1
    parts = [
        p.name if i < first_default else f"{p.name}={literal(p.default)}" for i, p in enumerate(positional)
    ]
    by_name = [p for p in parameters if p.kind is Parameter.KEYWORD_ONLY]
    if by_name:
        parts.append("*")
    for parameter in by_name:
        text = None if parameter.default is Parameter.empty else literal(parameter.default)
        parts.append(parameter.name if text is None else f"{parameter.name}={text}")
    return ", ".join(parts)
