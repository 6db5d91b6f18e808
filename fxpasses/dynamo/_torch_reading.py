"""What torch reads again and again while it compiles, read in less time: private names of torch 2.13, as in ``_torch.py``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch._guards import ChainedSource
from torch.utils._config_module import _UNSET_SENTINEL as _UNSET
from torch.utils._config_module import ConfigModule, _ConfigEntry

__all__ = ["knows_settings", "quick_settings", "quick_sources"]


@contextmanager
def quick_sources() -> Iterator[None]:
    """While this is open, the value at a source is read with code that is compiled once for each kind of step.

    A source is a chain of steps (``.weight``, ``[3]``), each written as a template of Python text. Dynamo compiles the text
    anew for each value that guards need: ten microseconds, for each of the hundreds of steps under a layer.
    """

    def get_value(
        self: Any, globals_: dict[str, Any], locals_: dict[str, Any], cache: dict[Any, Any], **told: Any
    ) -> Any:  # told: since 2.15 on_error(source, value of its base, error), for the source that fails
        try:
            return cache[self]
        except KeyError:
            pass
        if _STEP in locals_:
            return original(self, globals_, locals_, cache, **told)
        base = self.base.get_value(globals_, locals_, cache, **told)
        locals_[_STEP] = base
        try:
            value = cache[self] = eval(_step_code(self._name_template), globals_, locals_)
        except Exception as error:
            if told.get("on_error") is not None:
                told["on_error"](self, base, error)
            raise
        finally:
            del locals_[_STEP]
        return value

    original = ChainedSource.get_value
    with mock.patch.object(ChainedSource, "get_value", get_value):
        yield


_STEP = "_fxpasses_step"


@functools.lru_cache(maxsize=4096)
def _step_code(template: str) -> Any:
    return compile(template.format(_STEP), "<source>", "eval")


def knows_settings() -> bool:
    """Whether torch's settings are made of what :func:`quick_settings` knows."""
    return {field.name for field in dataclasses.fields(_ConfigEntry)} - _READ_ELSEWHERE == _SETTING_FIELDS


@contextmanager
def quick_settings() -> Iterator[None]:
    """While this is open, a setting of torch is read in a third of the time; Dynamo reads some for every guard and node.

    The values are what ``ConfigModule.__getattr__`` gives: it is asked about all that is not a plain value.
    """
    if not knows_settings():
        yield
        return
    original = ConfigModule.__getattr__

    def read(self: Any, name: str) -> Any:
        entry = self._config.get(name)
        if (
            entry is None
            or entry.hide
            or entry.alias is not None
            or entry.deprecated
            or entry.env_value_force is not _UNSET
        ):
            return original(self, name)
        value = entry.user_override.get()
        if value is not _UNSET:
            return value
        if entry.env_value_default is not _UNSET or entry.justknob is not None:
            return original(self, name)
        value = entry.default
        return value if type(value) in _PLAIN else original(self, name)

    with mock.patch.object(ConfigModule, "__getattr__", read):
        yield


_PLAIN = frozenset({bool, int, float, str, type(None)})
_SETTING_FIELDS = frozenset(
    {"default", "value_type", "user_override", "justknob", "env_value_force", "env_value_default", "hide"}
    | {"alias", "deprecated", "deprecation_message", "_deprecation_warned"}
)
"""What describes a setting in the versions of torch that :func:`quick_settings` knows (2.13 to 2.15)."""
_READ_ELSEWHERE = {"implies"}
"""What a class of its own looks at before it asks ``ConfigModule.__getattr__`` (since 2.15: settings that imply others)."""
