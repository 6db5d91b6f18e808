"""Checks of registration arguments other than functions: device types, dtypes, classes, effects, tags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fake.library.errors import RegistrationError, SchemaError
from fake.seam import library as _torch


def device_list(op: str, given: Any) -> list[str]:
    """Return one device type or several as a list.

    Raises:
        RegistrationError: ``given`` is something else, or empty.
    """
    names = [given] if isinstance(given, str) else list(given) if isinstance(given, Sequence) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise RegistrationError(
            f"{op}: device_types is {given!r}; pass 'cpu', 'cuda', ..., a list of them, or None for all",
            op=op,
        )
    return names


def dispatch_key(op: str, name: str) -> str:
    """Return the dispatch key for a device type, for ``"default"``, or for the name of a key.

    Raises:
        RegistrationError: there is no such device type or key.
    """
    if _torch.parse_dispatch_key(name):
        return name
    if name == "default":
        return "CompositeExplicitAutograd"
    try:
        return _torch.key_for_device(name)
    except RuntimeError as error:
        raise RegistrationError(
            f"{op}: {name!r} is neither a device type nor a dispatch key: {error}", op=op
        ) from error


def tags_of(op: str, given: Any) -> tuple[torch.Tag, ...]:
    """Return one tag, several or None as a tuple without duplicates.

    Raises:
        SchemaError: ``given`` is something else.
    """
    if given is None or isinstance(given, torch.Tag):
        return () if given is None else (given,)
    if not isinstance(given, Sequence) or not all(isinstance(tag, torch.Tag) for tag in given):
        raise SchemaError(
            f"{op}: tags is {given!r}; pass a torch.Tag, such as torch.Tag.pt2_compliant_tag, or a list of them",
            op=op,
        )
    return tuple(dict.fromkeys(given))


def check_cast(op: str, dtype: Any) -> None:
    """Raise `RegistrationError` unless autocast can cast inputs to ``dtype``."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise RegistrationError(
            f"{op}: cast_inputs is {dtype!r}; pass a floating-point type, such as torch.bfloat16", op=op
        )


def check_dispatch_class(op: str, given: Any) -> None:
    """Raise `RegistrationError` unless ``given`` is a class."""
    if not isinstance(given, type):
        raise RegistrationError(
            f"{op}: torch_dispatch_class is {given!r}; pass a class: a TorchDispatchMode or a subclass of Tensor",
            op=op,
        )


def check_effect(op: str, effect: Any) -> None:
    """Raise `RegistrationError` unless ``effect`` is an ``EffectType`` or None."""
    if effect is not None and not isinstance(effect, _torch.EffectType):
        raise RegistrationError(f"{op}: effect is {effect!r}; pass EffectType.ORDERED, or None", op=op)
