"""Argument types that no schema has: flattened into schema types by the wrapper, rebuilt for the kernel.

===============================  ==============================================================
annotation                       in the schema
===============================  ==============================================================
``Enum`` subclass                ``str`` (the member's name); ``Optional`` of it: ``str?``
dataclass, ``NamedTuple``        one argument a field, ``param_field``
``TypedDict``                    one argument a key, ``param_key``
``dict[Literal["a", "b"], T]``   one argument a key, ``param_key``
nested ``tuple[...]``            one argument an element, ``param_0``, ``param_1_0``
``Optional[list[Tensor]]``       ``Tensor[] param, bool param_given``; torch 2.15 has ``Tensor[]?``
``list[str]``                    ``str[]``; ``Optional`` of it: ``str[]?``
===============================  ==============================================================

A flat tuple of schema types (``tuple[int, int]``) at the top level is refused, as ``torch.library`` does:
write ``list[int]``. Fields may themselves be of any type in this table.

>>> import enum
>>> class Mode(enum.Enum):
...     FAST = 1
...     EXACT = 2
>>> codec = make_codec("mode", Mode)
>>> [str(leaf) for leaf in codec.leaves]
['str mode']
>>> codec.flatten(Mode.EXACT), codec.rebuild(["EXACT"])
(['EXACT'], <Mode.EXACT: 2>)
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union

import torch

from fake.library import _torch


@dataclass(frozen=True)
class Leaf:
    """One argument of the flat schema."""

    name: str
    schema_type: str

    def __str__(self) -> str:
        return f"{self.schema_type} {self.name}"


@dataclass(frozen=True)
class Codec:
    """Flattens one parameter into leaves, and rebuilds it.

    Attributes:
        leaves: the flat arguments, in order.
        flatten: value → one value a leaf.
        rebuild: one value a leaf → value.
        kind: the annotation's family; ``"plain"`` where the parameter is a schema type already.
        rebuild_grads: one gradient a leaf → what a backward formula sees (and the inverse is ``flatten_grads``).
    """

    leaves: tuple[Leaf, ...]
    flatten: Callable[[Any], list[Any]]
    rebuild: Callable[[Sequence[Any]], Any]
    kind: str
    children: tuple[tuple[Any, Codec], ...] = ()

    def flatten_grads(self, grads: Any) -> list[Any]:
        """One gradient a leaf, from what a backward formula returned for the parameter: None, or its structure."""
        if self.kind == "plain":
            return [grads]
        if self.kind == "optional list":
            return [grads, None]
        if grads is None or not self.children:
            return [None] * len(self.leaves)
        flat: list[Any] = []
        for key, child in self.children:
            if isinstance(grads, dict):
                part = grads.get(key)
            elif isinstance(grads, (tuple, list)):
                part = grads[[k for k, _ in self.children].index(key)]
            else:
                part = getattr(grads, key)
            flat += child.flatten_grads(part)
        return flat

    def structure(self, flat: Sequence[Any]) -> Any:
        """One value a leaf (say, batch dimensions), as nested dicts and tuples in the parameter's shape."""
        if self.kind in ("plain", "enum", "optional list"):
            return flat[0]
        parts = []
        position = 0
        for _, child in self.children:
            parts.append(child.structure(flat[position : position + len(child.leaves)]))
            position += len(child.leaves)
        if self.kind == "tuple":
            return tuple(parts)
        return {key: part for (key, _), part in zip(self.children, parts, strict=True)}


def _plain(name: str, schema_type: str) -> Codec:
    return Codec((Leaf(name, schema_type),), lambda value: [value], lambda leaves: leaves[0], "plain")


def _strip_optional(annotation: Any) -> tuple[Any, bool]:
    if typing.get_origin(annotation) in (Union, types.UnionType):
        members = [m for m in typing.get_args(annotation) if m is not type(None)]
        if len(members) == 1 and len(typing.get_args(annotation)) == 2:
            return members[0], True
    return annotation, False


def _is_list_of(annotation: Any, element: Any) -> bool:
    return typing.get_origin(annotation) in (
        list,
        Sequence,
        typing.get_origin(Sequence[int]),
    ) and typing.get_args(annotation) == (element,)


def make_codec(name: str, annotation: Any, *, nested: bool = False) -> Codec | None:
    """The codec of a parameter, or None where its annotation is not supported.

    Args:
        name: the parameter's name.
        annotation: its annotation.
        nested: whether it is a part of another argument (a field of a dataclass, an item of a tuple).
    """
    if annotation in _torch.SUPPORTED_PARAM_TYPES:
        return _plain(name, _torch.SUPPORTED_PARAM_TYPES[annotation])
    inner, optional = _strip_optional(annotation)
    if isinstance(inner, type) and issubclass(inner, enum.Enum):
        return _enum_codec(name, inner, optional)
    if _is_list_of(inner, str):
        return _plain(name, "str[]?" if optional else "str[]")
    if optional and _is_list_of(inner, torch.Tensor):
        return Codec(
            (Leaf(name, "Tensor[]"), Leaf(f"{name}_given", "bool")),
            lambda value: [[], False] if value is None else [value, True],
            lambda leaves: leaves[0] if leaves[1] else None,
            "optional list",
        )
    if optional:
        return None
    fields = _fields_of(inner)
    if fields is not None:
        return _composite(name, inner, *fields)
    if typing.get_origin(inner) is tuple:
        elements = typing.get_args(inner)
        nests = any(e not in _torch.SUPPORTED_PARAM_TYPES for e in elements)
        if Ellipsis not in elements and elements and (nests or nested):
            return _composite(name, inner, "tuple", [(i, e) for i, e in enumerate(elements)])
    return None


def _enum_codec(name: str, cls: type[enum.Enum], optional: bool) -> Codec:
    def flatten(value: Any) -> list[Any]:
        if value is None and optional:
            return [None]
        if not isinstance(value, cls):
            raise TypeError(f"argument {name!r} must be a {cls.__name__}, got {value!r}")
        return [value.name]

    def rebuild(leaves: Sequence[Any]) -> Any:
        return None if leaves[0] is None else cls[leaves[0]]

    return Codec((Leaf(name, "str?" if optional else "str"),), flatten, rebuild, "enum")


def _fields_of(annotation: Any) -> tuple[str, list[tuple[Any, Any]]] | None:
    """The family of a composite annotation and its (key, annotation) pairs."""
    if typing.get_origin(annotation) is dict:
        keys, value = typing.get_args(annotation)
        if typing.get_origin(keys) is Literal:
            return "dict", [(key, value) for key in typing.get_args(keys)]
        return None
    if not inspect.isclass(annotation):
        return None
    if dataclasses.is_dataclass(annotation):
        hints = typing.get_type_hints(annotation)
        return "dataclass", [(f.name, hints[f.name]) for f in dataclasses.fields(annotation) if f.init]
    if typing.is_typeddict(annotation):
        return "dict", list(typing.get_type_hints(annotation).items())
    if issubclass(annotation, tuple) and hasattr(annotation, "_fields") and annotation.__annotations__:
        hints = typing.get_type_hints(annotation)
        return "namedtuple", [(field, hints[field]) for field in annotation._fields]
    return None


def _composite(name: str, annotation: Any, kind: str, fields: list[tuple[Any, Any]]) -> Codec | None:
    children: list[tuple[Any, Codec]] = []
    for key, field in fields:
        child = make_codec(f"{name}_{key}", field, nested=True)
        if child is None:
            return None
        children.append((key, child))
    label = getattr(annotation, "__name__", str(annotation))
    keys = [key for key, _ in children]

    def flatten(value: Any) -> list[Any]:
        if kind == "dict":
            if set(value) != set(keys):
                raise TypeError(f"argument {name!r} must have exactly the keys {keys}, got {list(value)}")
            parts = [value[key] for key in keys]
        elif kind == "tuple":
            if len(value) != len(keys):
                raise TypeError(f"argument {name!r} must have {len(keys)} elements, got {len(value)}")
            parts = list(value)
        else:
            if not isinstance(value, annotation):
                raise TypeError(f"argument {name!r} must be a {label}, got {value!r}")
            parts = [getattr(value, key) for key in keys]
        flat: list[Any] = []
        for (_, child), part in zip(children, parts, strict=True):
            flat += child.flatten(part)
        return flat

    def rebuild(leaves: Sequence[Any]) -> Any:
        parts = []
        position = 0
        for _, child in children:
            parts.append(child.rebuild(leaves[position : position + len(child.leaves)]))
            position += len(child.leaves)
        if kind == "dict":
            return dict(zip(keys, parts, strict=True))
        if kind == "tuple":
            return tuple(parts)
        return annotation(**dict(zip(keys, parts, strict=True)))

    leaves = tuple(leaf for _, child in children for leaf in child.leaves)
    return Codec(leaves, flatten, rebuild, kind, tuple(children))
