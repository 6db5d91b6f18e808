"""Argument types that schemas lack: flattened into schema types by the wrapper, rebuilt for the kernel.

===============================  ==============================================================
annotation                       in the schema
===============================  ==============================================================
``Enum`` subclass                ``str`` (the member's name); ``Optional`` of it: ``str?``
dataclass, ``NamedTuple``        one argument per field, ``param_field``
``TypedDict``                    one argument per key, ``param_key``
``dict[Literal["a", "b"], T]``   one argument per key, ``param_key``
nested ``tuple[...]``            one argument per element, ``param_0``, ``param_1_0``
``Optional[list[Tensor]]``       ``Tensor[] param, bool param_given``; torch 2.15 has ``Tensor[]?``
``list[str]``                    ``str[]``; ``Optional`` of it: ``str[]?``
===============================  ==============================================================

A flat tuple of schema types (``tuple[int, int]``) at the top level is refused, as in ``torch.library``: write
``list[int]``. Fields may themselves have any type in this table.

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
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, Literal, Union

import torch

from fake.library.errors import SchemaError, UnsupportedAnnotationError
from fake.library.schema import annotation_text, infer_schema, supported_annotations
from fake.seam import library as _torch


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
        flatten: value → one value per leaf.
        rebuild: one value per leaf → value.
        kind: the annotation's family; ``"plain"`` if the parameter already has a schema type.
        children: the parts of a composite parameter, as (key, codec) pairs; empty for others.
    """

    leaves: tuple[Leaf, ...]
    flatten: Callable[[Any], list[Any]]
    rebuild: Callable[[Sequence[Any]], Any]
    kind: str
    children: tuple[tuple[Any, Codec], ...] = ()

    def flatten_grads(self, grads: Any) -> list[Any]:
        """Return one gradient per leaf from a formula's result: None, or in the parameter's structure."""
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
        """Nest one value per leaf (say, batch dimensions) as dicts and tuples of the parameter's shape."""
        if self.kind in ("plain", "enum", "optional list"):
            return flat[0]
        parts = [
            child.structure(part) for child, part in _split_by_codec((c for _, c in self.children), flat)
        ]
        if self.kind == "tuple":
            return tuple(parts)
        return {key: part for (key, _), part in zip(self.children, parts, strict=True)}


def _split_by_codec(codecs: Iterable[Codec], flat: Sequence[Any]) -> Iterator[tuple[Codec, Sequence[Any]]]:
    """Yield each codec with its slice of the flat leaves."""
    end = 0
    for codec in codecs:
        start, end = end, end + len(codec.leaves)
        yield codec, flat[start:end]


def _plain_codec(name: str, schema_type: str) -> Codec:
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
    """Return the codec of a parameter, or None if its annotation is not supported.

    Args:
        name: the parameter's name.
        annotation: its annotation.
        nested: whether it is part of another argument (a field of a dataclass, an item of a tuple).
    """
    if annotation in _torch.SUPPORTED_PARAM_TYPES:
        return _plain_codec(name, _torch.SUPPORTED_PARAM_TYPES[annotation])
    inner, optional = _strip_optional(annotation)
    if isinstance(inner, type) and issubclass(inner, enum.Enum):
        return _enum_codec(name, inner, optional)
    if _is_list_of(inner, str):
        return _plain_codec(name, "str[]?" if optional else "str[]")
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
        return _composite_codec(name, inner, *fields)
    if typing.get_origin(inner) is tuple:
        elements = typing.get_args(inner)
        nests = any(e not in _torch.SUPPORTED_PARAM_TYPES for e in elements)
        if Ellipsis not in elements and elements and (nests or nested):
            return _composite_codec(name, inner, "tuple", [(i, e) for i, e in enumerate(elements)])
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
    """Return the family of a composite annotation and its (key, annotation) pairs."""
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


def _composite_codec(name: str, annotation: Any, kind: str, fields: list[tuple[Any, Any]]) -> Codec | None:
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
        parts = [child.rebuild(part) for child, part in _split_by_codec((c for _, c in children), leaves)]
        if kind == "dict":
            return dict(zip(keys, parts, strict=True))
        if kind == "tuple":
            return tuple(parts)
        return annotation(**dict(zip(keys, parts, strict=True)))

    leaves = tuple(leaf for _, child in children for leaf in child.leaves)
    return Codec(leaves, flatten, rebuild, kind, tuple(children))


_EXTENDED = (
    "Enum subclasses",
    "dataclasses",
    "NamedTuple",
    "TypedDict",
    'dict[Literal["a", "b"], T]',
    "nested tuple[...]",
    "Optional[list[Tensor]]",
    "list[str]",
)


def _annotations(fn: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(fn)
    except (NameError, TypeError, AttributeError):
        # torch's own inference reports unresolvable annotations better.
        return dict(getattr(fn, "__annotations__", {}))


def needs_layout(fn: Callable[..., Any]) -> bool:
    """Return whether ``fn`` has a parameter of an extended type."""
    annotations = _annotations(fn)
    codecs = [make_codec(name, a) for name, a in annotations.items() if name != "return"]
    return any(c is not None and (c.kind != "plain" or "str[]" in c.leaves[0].schema_type) for c in codecs)


class ArgumentLayout:
    """Maps each parameter to its leaves in the flat schema.

    Attributes:
        signature: the author's signature.
        codecs: one codec per parameter, in order.
    """

    def __init__(self, op: str, fn: Callable[..., Any]) -> None:
        annotations = _annotations(fn)
        self.op = op
        self.signature = inspect.signature(fn)
        self.codecs: dict[str, Codec] = {}
        for name, parameter in self.signature.parameters.items():
            if parameter.kind not in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
                raise SchemaError(
                    f"{op}: positional-only arguments, varargs and varkwargs are not supported", op=op
                )
            if name not in annotations:
                raise UnsupportedAnnotationError(
                    f"{op}: Parameter {name} must have a type annotation.",
                    op=op,
                    argument=name,
                    annotation=None,
                )
            codec = make_codec(name, annotations[name])
            if codec is None:
                supported = (*supported_annotations(), *_EXTENDED)
                raise UnsupportedAnnotationError(
                    f"{op}: Parameter {name} has unsupported type {annotation_text(annotations[name])}. "
                    f"Supported are: {', '.join(supported)}.",
                    op=op,
                    argument=name,
                    annotation=annotations[name],
                    supported=supported,
                )
            self.codecs[name] = codec
        self._return = annotations.get("return", inspect.Signature.empty)
        kinds = {n: p.kind is Parameter.KEYWORD_ONLY for n, p in self.signature.parameters.items()}
        self._positional = [c for n, c in self.codecs.items() if not kinds[n]]
        self._keyword_only = {n: c for n, c in self.codecs.items() if kinds[n]}
        names = [leaf.name for codec in self.codecs.values() for leaf in codec.leaves]
        clashes = sorted({n for n in names if names.count(n) > 1})
        if clashes:
            raise SchemaError(
                f"{op}: two arguments of the flat schema would be called {clashes[0]!r}; rename a parameter or field",
                op=op,
                argument=clashes[0],
            )

    # --- the flat schema ---------------------------------------------------------------------------
    def schema(self, mutates_args: str | Iterable[str]) -> str:
        """Return the flat schema without the operator's name.

        ``mutates_args`` may name parameters (all their tensors) or single leaves.

        Raises:
            SchemaError: it names something else, or a leaf that is not a tensor.
        """
        everything = mutates_args == "unknown"
        wanted = set() if everything else set(mutates_args)
        known: set[str] = set()
        parts: list[str] = []
        index = 0
        for name, codec in self.codecs.items():
            if codec in self._keyword_only.values() and "*" not in parts:
                parts.append("*")
            known.add(name)
            for leaf in codec.leaves:
                known.add(leaf.name)
                schema_type = leaf.schema_type
                tensor = schema_type.startswith("Tensor")
                if leaf.name in wanted and not tensor and not (codec.kind != "plain" and leaf.name == name):
                    raise SchemaError(
                        f"{self.op}: Parameter {leaf.name} is in mutates_args but only Tensors or collections of "
                        "Tensors can be mutated",
                        op=self.op,
                        argument=leaf.name,
                    )
                if tensor and (everything or leaf.name in wanted or name in wanted):
                    schema_type = f"Tensor(a{index}!){schema_type[len('Tensor') :]}"
                parts.append(f"{schema_type} {leaf.name}")
                index += 1
        if wanted - known:
            raise SchemaError(
                f"{self.op}: {wanted - known} in mutates_args were not found in the custom op's signature. "
                "mutates_args should contain the names of all args that the custom op mutates, or just the string "
                "'unknown' if you don't know.",
                op=self.op,
            )
        return f"({', '.join(parts)}) -> {self._return_schema()}"

    def _return_schema(self) -> str:
        def prototype() -> Any: ...

        prototype.__annotations__["return"] = self._return
        prototype = types.FunctionType(prototype.__code__, {"torch": torch})
        prototype.__signature__ = inspect.Signature([], return_annotation=self._return)  # type: ignore[attr-defined]
        return infer_schema(prototype, mutates_args=()).split("->", 1)[1].strip()

    # --- calls -------------------------------------------------------------------------------------
    def flatten_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Flatten a call of the author's signature into positional and keyword-only arguments."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        flat: list[Any] = []
        keywords: dict[str, Any] = {}
        for name, codec in self.codecs.items():
            values = codec.flatten(bound.arguments[name])
            if name in self._keyword_only:
                keywords.update(zip((leaf.name for leaf in codec.leaves), values, strict=True))
            else:
                flat += values
        return flat, keywords

    def rebuild_positional(self, flat: Sequence[Any]) -> tuple[Any, ...]:
        """Return the author's positional arguments."""
        return tuple(codec.rebuild(part) for codec, part in _split_by_codec(self._positional, flat))

    def rebuild_keywords(self, flat: dict[str, Any]) -> dict[str, Any]:
        """Return the author's keyword-only arguments."""
        return {n: c.rebuild([flat[leaf.name] for leaf in c.leaves]) for n, c in self._keyword_only.items()}

    # --- adaptors ----------------------------------------------------------------------------------
    def adapt_kernel(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a kernel or fake kernel so that it takes the flat arguments."""

        @functools.wraps(fn)
        def kernel(*flat: Any, **keywords: Any) -> Any:
            return fn(*self.rebuild_positional(flat), **self.rebuild_keywords(keywords))

        del kernel.__wrapped__  # so that inspect reports the flat signature
        return kernel

    def adapt_setup_context(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``setup_context`` so that it sees rebuilt inputs."""

        def setup_context(
            ctx: Any, inputs: Sequence[Any], output: Any, keyword_only_inputs: Any = None
        ) -> None:
            """Args: the context, the flat inputs, the output, and any keyword-only inputs by name."""
            rebuilt = self.rebuild_positional(inputs)
            if keyword_only_inputs is None:
                fn(ctx=ctx, inputs=rebuilt, output=output)
            else:
                keywords = self.rebuild_keywords(keyword_only_inputs)
                fn(ctx=ctx, inputs=rebuilt, keyword_only_inputs=keywords, output=output)

        return setup_context

    def adapt_backward(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a backward formula that returns, per parameter, None or gradients in its structure."""

        def backward(ctx: Any, *grads: Any) -> Any:
            result = fn(ctx, *grads)
            parts = result if isinstance(result, tuple) else (result,)
            flat: list[Any] = []
            for codec, part in zip(self._positional, parts, strict=True):
                flat += codec.flatten_grads(part)
            return tuple(flat)

        return backward

    def adapt_vmap(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a vmap rule; batch dimensions of an extended parameter come in its structure."""

        def rule(info: Any, in_dims: Sequence[Any], *flat: Any, **keywords: Any) -> Any:
            dims = tuple(codec.structure(part) for codec, part in _split_by_codec(self._positional, in_dims))
            return fn(info, dims, *self.rebuild_positional(flat), **self.rebuild_keywords(keywords))

        return rule
