"""Parse passes written as text: ``fold_constants{max_bytes=1024 min_calls=2},eliminate_dead_code``."""

from __future__ import annotations

import ast
import dataclasses
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

from fxpasses.errors import OptionsError, unknown_name
from fxpasses.pass_manager.pass_base import Pass, fits_hint, option_fields

PassFactory = Callable[..., Pass]

_SPECIFICATION = re.compile(r"^\s*(?P<name>[^\s{}=,]+)\s*(?:\{(?P<options>.*)\}\s*)?$", re.DOTALL)
_OPTION = re.compile(
    r"""\s*(?P<name>\w+)(?:=(?P<value>"[^"]*"|'[^']*'|\([^)]*\)|\[[^\]]*\]|[^\s,]+))?(?:\s*,|\s|$)"""
)


def split_pipeline(text: str) -> list[str]:
    """Split a comma-separated pipeline into its passes, each with its options.

    >>> split_pipeline("fold_constants{max_bytes=1024, min_calls=2},eliminate_dead_code")
    ['fold_constants{max_bytes=1024, min_calls=2}', 'eliminate_dead_code']
    """
    return [part.strip() for part in re.split(r",(?![^{]*\})", text) if part.strip()]


def parse_pass(text: str, available: Mapping[str, PassFactory | Pass]) -> Pass:
    """Create a pass from ``name{option=value}``. Values get the types of the pass's fields.

    A flag without a value is ``True``. Raises OptionsError, with the nearest name, for malformed text and for
    unknown passes and options.

    >>> from fxpasses.passes import library
    >>> parse_pass("fold_constants{max_bytes=1024}", library())
    FoldConstants(max_bytes=1024, min_calls=4)
    """
    form = _SPECIFICATION.match(text)
    if form is None:
        raise OptionsError("passes", text, "a pass as name{option=value other=value}")
    name, options = form["name"], form["options"]
    if name == "default":
        raise OptionsError(
            "passes", text, "one pass ('default' stands for all that run where none are named)"
        )
    if name not in available:
        valid = [*available, "default"]
        raise OptionsError("passes", name, valid=valid, problem=unknown_name("pass", name, valid))
    found = available[name]
    if isinstance(found, Pass):
        if not options:
            return found
        return dataclasses.replace(found, **_parse_options(type(found), options, text))
    return found(**_parse_options(found, options or "", text))


def _parse_options(kind: Any, text: str, where: str) -> dict[str, Any]:
    """Parse ``option=value other=value`` to values by name, with the types of the dataclass ``kind``.

    Raises:
        OptionsError: if an option is unknown, or a value has another type.
    """
    hints = typing.get_type_hints(kind)
    fields = [field.name for field in option_fields(kind)]
    values: dict[str, Any] = {}
    rest = text.strip()
    while rest:
        form = _OPTION.match(rest)
        if form is None:
            raise OptionsError("passes", where, "options as option=value, separated by spaces")
        name, value = form["name"], form["value"]
        if name not in fields:
            raise OptionsError(
                "passes", where, valid=fields, problem=unknown_name("pass option", name, fields)
            )
        if name in values:
            raise OptionsError("passes", where, f"option {name!r} once")
        if value is None and not fits_hint(True, hints[name]):
            raise OptionsError("passes", where, f"a value for option {name!r}: {name}=...")
        values[name] = True if value is None else _convert(value, hints[name], f"{where}: {name}")
        rest = rest[form.end() :].strip()
    return values


def _convert(text: str, hint: Any, where: str) -> Any:
    """Convert ``text`` to a value of type ``hint``."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = {"true": True, "false": False, "none": None}.get(text.lower(), text)
    if fits_hint(value, hint):
        return float(value) if hint is float else value
    if fits_hint(text, hint):
        return text
    if typing.get_origin(hint) is tuple and not isinstance(value, tuple):
        items = tuple(value) if isinstance(value, list) else (value,)
        if fits_hint(items, hint):
            return items
    name = hint.__name__ if isinstance(hint, type) else str(hint)
    raise OptionsError(where, text, f"a value of type {name}")
