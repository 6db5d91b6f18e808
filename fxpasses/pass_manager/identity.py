"""The identity of a pass: everything that determines its result, as hashes for the compile caches.

:func:`identify` walks from an object to everything that its behavior depends on: the compiled code of its
methods and of its bases' methods, the functions and classes that this code names, their defaults and
closures, the global constants and modules that it reads, and the values of its fields. Each is a *factor*
with its own label and hash, so that two identities can be compared and the one thing that changed can be
named.

The walk follows the user's own code. It stops at torch, the standard library and other installed packages,
which count with their version, unless the pass itself is defined there.

The hash covers the compiled code, not the source text: that is what runs, even if the file has changed since
it was imported, and it also exists for passes typed at a prompt.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import enum
import functools
import hashlib
import logging
import re
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import sympy
import torch

from fake.seam.dispatch import HigherOrderOperator, OpOverload, OpOverloadPacket
from fxpasses.pass_manager.code_objects import (
    attribute_names,
    constants,
    generated_methods,
    global_names,
    is_installed,
    is_state,
    module_of,
    slots,
    top_level,
    version_of,
)


@dataclass(frozen=True)
class Identity:
    """The factors that determine what an object does.

    Attributes:
        name: the name of the pass, function, class or object.
        factors: maps each factor's label (``"code mylib.helpers.fuse"``, ``"option threshold"``) to its hash.
        unknown: labels of what could not be hashed. If there are any, there is no digest.
    """

    name: str
    factors: Mapping[str, str]
    unknown: tuple[str, ...] = ()

    @property
    def digest(self) -> str | None:
        """One hash of all factors, or ``None`` if one of them is unknown."""
        return None if self.unknown else _hash(repr(sorted(self.factors.items())))

    def differences(self, other: Identity) -> list[str]:
        """The labels of the factors that differ in ``other``, in order.

        A module is omitted if what differs in it is a factor of its own.
        """
        labels = sorted({*self.factors, *other.factors})
        differing = [label for label in labels if self.factors.get(label) != other.factors.get(label)]
        inside = {label.partition(" ")[2].rpartition(".")[0] for label in differing}
        return [label for label in differing if label.partition(" ")[2] not in inside]


def identify(item: Any) -> Identity:
    """Compute the identity of a pass (or of any function, class or object).

    >>> from fxpasses.passes import EliminateDeadCode
    >>> for label in identify(EliminateDeadCode()).factors:
    ...     if "eliminate_dead_code" in label: print(label)
    code fxpasses.passes.eliminate_dead_code.EliminateDeadCode
    code fxpasses.passes.eliminate_dead_code.EliminateDeadCode.apply
    code fxpasses.passes.eliminate_dead_code._may_be_erased
    """
    walk = _Walk(_followed_packages(item))
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        walk.reference(type(item))
        for option in dataclasses.fields(item):
            value = getattr(item, option.name)
            walk.factor(f"option {option.name}", value)
            if value is None or type(value) in (
                bool,
                int,
                float,
                str,
            ):  # readable for cache miss explanations
                walk.factors[f"option {option.name}"] = repr(value)
    else:
        walk.factor("object", item)
    name = getattr(item, "name", None) or getattr(item, "__qualname__", type(item).__qualname__)
    return Identity(str(name), dict(sorted(walk.factors.items())), tuple(walk.unknown))


class _Unknown(Exception):
    """A value that cannot be hashed."""


_STATE = (ContextVar, threading.Thread, weakref.ref, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet, type(threading.Lock()), type(threading.RLock()), threading.local)  # fmt: skip
"""Objects that hold state, not constants. Only their type counts."""

_BY_REPR = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Tag,
    range,
    sympy.Basic,
    re.Pattern,
    PurePath,
)

_FRAMEWORK = {"fxpasses.pass_manager.pass_base", "fxpasses.pass_manager.code_objects", __name__}
"""Modules that every pass reaches through its base class, and that do not affect its result."""

_IGNORED = {
    "__dict__", "__weakref__", "__module__", "__doc__", "__annotations__", "__abstractmethods__", "_abc_impl", "__firstlineno__",
    "__static_attributes__", "__orig_bases__", "__parameters__", "__annotate__", "__annotations_cache__", "__qualname__",
}  # fmt: skip
"""Class attributes that do not affect what the class does."""


class _Walk:
    """One walk. Values become text; what has a name of its own becomes a factor, represented by its label."""

    def __init__(self, packages: frozenset[str]) -> None:
        self.packages = packages
        self.factors: dict[str, str] = {}
        self.unknown: list[str] = []
        self._labels: dict[int, str] = {}
        self._read: set[tuple[types.ModuleType, types.CodeType]] = set()
        self._kept_alive: list[Any] = []
        """Keeps the labeled objects alive, so that no other object gets the id of one."""

    def factor(self, label: str, value: Any) -> None:
        """Make ``value`` a separate factor."""
        self._write(label, self.text, value)

    def reference(self, value: Any) -> str:
        """The label of a function, class or module, which becomes a factor the first time it is met."""
        if id(value) in self._labels:
            return self._labels[id(value)]
        module = value.__name__ if isinstance(value, types.ModuleType) else module_of(value)
        if not self._is_followed(module):
            label = f"version {top_level(module)}"
            self.factors[label] = version_of(top_level(module))
            return f"{module}.{getattr(value, '__qualname__', '')}"
        kind = "module" if isinstance(value, types.ModuleType) else "code"
        own_name = "" if kind == "module" else f".{value.__qualname__}"
        label = f"{kind} {module}{own_name}"
        same = sum(other == label or other.startswith(f"{label} #") for other in self._labels.values())
        label += f" #{same + 1}" if same else ""
        self._labels[id(value)] = label
        self._kept_alive.append(value)
        self._write(label, self._definition, value)
        return label

    def _write(self, label: str, write: Callable[[Any], str], value: Any) -> None:
        try:
            self.factors[label] = _hash(write(value))
        except _Unknown:
            self.factors[label] = "unknown"
            self.unknown.append(label)

    def _definition(self, value: Any) -> str:
        if isinstance(value, types.ModuleType):
            return _file_hash(value)
        if isinstance(value, type):
            return self._class(value)
        return self._function(value)

    def _function(self, function: types.FunctionType) -> str:
        parts = [
            self._code(function.__code__),
            self.text(function.__defaults__),
            self.text(function.__kwdefaults__),
        ]
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            label = f"closure {function.__module__}.{function.__qualname__}.{name}"
            try:
                value = cell.cell_contents
            except ValueError:
                continue  # not assigned yet
            if is_state(function.__code__, name, value):
                self.factors[label] = "state"
                self.unknown.append(label)
            elif value is not function:
                parts.append(self._named_value(label, value))
        scope = function.__globals__
        for name in global_names(function.__code__):
            if name in scope:
                parts.append(self._named_value(f"constant {function.__module__}.{name}", scope[name]))
                self._attributes(scope[name], function.__code__)
        if wrapped := getattr(function, "__wrapped__", None):
            parts.append(self.text(wrapped))
        return "\n".join(parts)

    def _named_value(self, label: str, value: Any) -> str:
        """A global or closed-over value: a definition is named by its label, a constant becomes a factor."""
        if isinstance(value, (type, types.ModuleType, types.FunctionType)) or _is_plain(value):
            return self.text(value)
        if label not in self.factors:
            self.factors[label] = ""  # a value may lead back to itself
            self.factor(label, value)
        return label

    def _attributes(self, value: Any, code: types.CodeType) -> None:
        """Follow the attributes that ``code`` reads from a followed module, such as ``helpers.fuse``."""
        if isinstance(value, types.ModuleType) and self._is_followed(value.__name__):
            if (
                value,
                code,
            ) in self._read:  # a module may have itself, or one that imported it, for an attribute
                return
            self._read.add((value, code))
            for name in attribute_names(code):
                if name in vars(value):
                    self._named_value(f"constant {value.__name__}.{name}", vars(value)[name])
                    self._attributes(vars(value)[name], code)

    def _class(self, value: type) -> str:
        parts = [self.text(base) for base in value.__bases__]
        left_out = _IGNORED | generated_methods(value)
        for name, attribute in sorted(vars(value).items()):
            if name in left_out or name.startswith("__dataclass"):
                continue
            if isinstance(attribute, (types.MemberDescriptorType, types.GetSetDescriptorType)):
                continue
            parts.append(f"{name}={self.text(attribute)}")
        return "\n".join(parts)

    def _code(self, code: types.CodeType) -> str:
        values = [self._code(c) if isinstance(c, types.CodeType) else self.text(c) for c in constants(code)]
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        return repr((code.co_code.hex(), values, names, shape, code.co_exceptiontable.hex()))

    def text(self, value: Any) -> str:
        """Write a value as text that is equal for equal values and differs otherwise. Raises ``_Unknown``."""
        if value is None or (isinstance(value, (bool, int, str, bytes)) and not isinstance(value, enum.Enum)):
            return f"{type(value).__name__}:{value!r}"
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise _Unknown
        if isinstance(value, float):
            return f"float:{value.hex()}"
        for kinds, write in _WRITERS:
            if isinstance(value, kinds):
                return write(self, value)
        return self._object(value)

    def _object(self, value: Any) -> str:
        kind = type(value)
        if typing.get_origin(value) is not None or isinstance(value, typing.TypeVar):
            return repr(value)
        if id(value) in self._labels:
            return self._labels[id(value)]
        if not self._is_followed(kind.__module__) and not dataclasses.is_dataclass(value):
            raise _Unknown
        self._labels[id(value)] = f"the {len(self._labels)}th object"
        self._kept_alive.append(value)
        if dataclasses.is_dataclass(value):
            names = [f.name for f in dataclasses.fields(value)]
        else:
            declared = [s for c in kind.__mro__ for s in slots(c)]
            names = sorted({*getattr(value, "__dict__", {}), *declared})
        state = [f"{name}={self.text(getattr(value, name))}" for name in names if hasattr(value, name)]
        return f"{self.text(kind)}({', '.join(state)})"

    def _is_followed(self, module: str) -> bool:
        top = top_level(module)
        return module not in _FRAMEWORK and (top in self.packages or not is_installed(top))


_Writer = Callable[[_Walk, Any], str]


def _listed(value: Any, items: Iterable[str]) -> str:
    return f"{type(value).__name__}({', '.join(items)})"


def _tensor(walk: _Walk, value: torch.Tensor) -> str:
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        raise _Unknown
    data = value.detach().cpu().contiguous().flatten().view(torch.uint8) if value.numel() else value
    content = _hash(data.numpy().tobytes()) if value.numel() else ""
    return f"tensor({value.dtype}, {tuple(value.shape)}, {value.stride()}, {value.device}, {content})"


_WRITERS: list[tuple[Any, _Writer]] = [
    (enum.Enum, lambda walk, v: f"{walk.text(type(v))}.{v.name}={v.value!r}"),
    (complex, lambda walk, v: repr(v)),
    ((type, types.FunctionType, types.ModuleType), _Walk.reference),
    ((list, tuple), lambda walk, v: _listed(v, map(walk.text, v))),  # torch.Size and the lists of FX too
    ((set, frozenset), lambda walk, v: _listed(v, sorted(map(walk.text, v)))),
    ((dict, types.MappingProxyType, collections.ChainMap), lambda walk, v: _listed(v, (f"{walk.text(k)}: {walk.text(x)}" for k, x in v.items()))),
    (_BY_REPR, lambda walk, v: f"{type(v).__name__}:{v!r}"),
    (OpOverload, lambda walk, v: f"operator {v._schema}"),
    ((OpOverloadPacket, HigherOrderOperator), lambda walk, v: f"operator {v}"),
    (torch.Tensor, _tensor),
    (types.MethodType, lambda walk, v: f"method({walk.text(v.__func__)}, {walk.text(v.__self__)})"),
    (functools.partial, lambda walk, v: f"partial({walk.text(v.func)}, {walk.text(v.args)}, {walk.text(v.keywords)})"),
    ((staticmethod, classmethod), lambda walk, v: _listed(v, (walk.text(v.__func__),))),
    (property, lambda walk, v: f"property({walk.text(v.fget)}, {walk.text(v.fset)}, {walk.text(v.fdel)})"),
    (functools.cached_property, lambda walk, v: f"cached({walk.text(v.func)})"),
    (logging.Logger, lambda walk, v: f"logger {v.name}"),
    (_STATE, lambda walk, v: f"state {type(v).__name__}"),
    ((types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType), lambda walk, v: f"built-in {v.__qualname__}"),
    (types.EllipsisType, lambda walk, v: "..."),
    (functools._lru_cache_wrapper, lambda walk, v: f"cached({walk.text(v.__wrapped__)})"),
]  # fmt: skip
"""Writers of values by type. The first match wins."""


def _is_plain(value: Any) -> bool:
    """Whether the value is fully identified by its text: a built-in, an operator, a logger, state."""
    return isinstance(
        value, (OpOverload, OpOverloadPacket, types.BuiltinFunctionType, logging.Logger, *_STATE)
    )


def _followed_packages(item: Any) -> frozenset[str]:
    """The top-level modules that the item belongs to: its class's and those of functions in its fields."""
    given = vars(item).values() if dataclasses.is_dataclass(item) and not isinstance(item, type) else ()
    owners = [item, *(value for value in given if isinstance(value, types.FunctionType))]
    return frozenset(top_level(module_of(owner)) for owner in owners)


def _file_hash(module: types.ModuleType) -> str:
    """The hash of a module's file. For Python source, whitespace and comments do not count."""
    file = getattr(module, "__file__", None)
    if file is None or not Path(file).is_file():
        raise _Unknown
    content = Path(file).read_bytes()
    return _hash(ast.dump(ast.parse(content)) if file.endswith(".py") else content)


def _hash(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()
