"""Infer schemas from annotations, and check schemas before anything is defined."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fake.library.errors import ReservedNamespaceError, SchemaError, UnsupportedAnnotationError
from fake.seam import library as _torch

#: Whether a schema (text or object) neither mutates nor aliases and returns something.
is_functional_schema = _torch.is_functional_schema
#: Whether a schema type is a list of tensors, optional ones included.
is_tensorlist_like_type = _torch.is_tensorlist_like_type

#: Namespaces in which only torch may define operators.
RESERVED_NAMESPACES = frozenset({"aten", "at", "prim", "prims", "pytorch", "torch"})


_NAMELESS_SCHEMA = re.compile(r"\(.*\) -> .*", re.DOTALL)


def annotation_text(annotation: object) -> str:
    """Return an annotation as it would be written in source code."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__name__
    return str(annotation).replace("typing.", "")


def supported_annotations() -> tuple[str, ...]:
    """Return the parameter annotations that have their own schema type."""
    return tuple(dict.fromkeys(annotation_text(a) for a in _torch.SUPPORTED_PARAM_TYPES))


def infer_schema(
    prototype_function: Callable[..., Any],
    /,
    *,
    mutates_args: str | Iterable[str] = (),
    op_name: str | None = None,
    tags: torch.Tag | Sequence[torch.Tag] | None = (),
) -> str:
    """Return the schema of an annotated function, without the operator's name unless ``op_name`` is given.

    The rules are those of ``torch.library.infer_schema``.

    Args:
        prototype_function: the function whose annotations are read.
        mutates_args: names of the arguments that it mutates, or ``"unknown"``.
        op_name: the operator's name.
        tags: tags of the operator.

    Raises:
        UnsupportedAnnotationError: an annotation is missing or has no schema type;
            the message lists those that do.
        SchemaError: ``mutates_args`` names something that is not a tensor argument.

    >>> import torch
    >>> def scale(x: torch.Tensor, by: float = 2.0) -> torch.Tensor: ...
    >>> infer_schema(scale, op_name="scale")
    'scale(Tensor x, float by=2.0) -> Tensor'
    """
    if not hasattr(prototype_function, "__globals__"):
        raise SchemaError(
            f"{prototype_function!r} is no function with annotations; wrap it: def fn(x: Tensor) -> Tensor: ...",
            op=op_name,
        )
    keywords: dict[str, Any] = {
        "mutates_args": normalize_mutates_args(mutates_args, op_name),
        "op_name": op_name,
    }
    if _torch.INPLACE_TAG is not None and tags:
        keywords["tags"] = tags
    try:
        return torch.library.infer_schema(prototype_function, **keywords)
    except ValueError as error:
        message = str(error)
        if (
            "annotation" in message
            or "unsupported type" in message
            or "unsupported return type" in message.lower()
        ):
            raise UnsupportedAnnotationError(
                message, op=op_name, argument=None, annotation=None, supported=supported_annotations()
            ) from error
        raise SchemaError(message, op=op_name) from error


def split_qualname(qualname: str) -> tuple[str, str]:
    """Split ``"ns::name"`` into ``("ns", "name")``.

    Raises:
        SchemaError: the name does not have that form.
    """
    parts = qualname.split("::") if isinstance(qualname, str) else []
    if len(parts) != 2 or not all(parts):
        raise SchemaError(
            f"{qualname!r} is not the name of an operator: expected a namespace, '::' and a name, "
            "for example 'mylib::my_op'.",
            op=str(qualname),
        )
    return parts[0], parts[1]


def normalize_mutates_args(mutates_args: Any, op: str | None) -> str | tuple[str, ...]:
    """Return ``mutates_args`` as a tuple, or the string ``"unknown"``.

    Raises:
        SchemaError: it is something else.
    """
    if isinstance(mutates_args, str):
        if mutates_args == "unknown":
            return mutates_args
        raise SchemaError(
            f"mutates_args is the string {mutates_args!r}; it must either be a sequence of the names of the arguments "
            f"that are mutated, for example [{mutates_args!r}], or the string 'unknown'.",
            op=op,
        )
    names = tuple(mutates_args) if isinstance(mutates_args, Iterable) else (None,)
    if not all(isinstance(name, str) for name in names):
        raise SchemaError(
            f"mutates_args is {mutates_args!r}; it must either be a sequence of the names of the arguments that are "
            "mutated, () for none, or the string 'unknown'.",
            op=op,
        )
    return names


def check_nameless(schema: Any, call: str, op: str) -> None:
    """Check that a schema is a string without an operator's name.

    Args:
        schema: the value to check.
        call: the call that takes it, for the message.
        op: the operator's name, for the error.

    Raises:
        SchemaError: it is something else.
    """
    if not isinstance(schema, str) or not _NAMELESS_SCHEMA.fullmatch(schema):
        raise SchemaError(
            f'{call}: expected schema to look like e.g. "(Tensor x) -> Tensor" but got "{schema}"', op=op
        )


def check_namespace(namespace: str) -> None:
    """Raise `ReservedNamespaceError` if only torch may define operators in ``namespace``."""
    if namespace in RESERVED_NAMESPACES:
        raise ReservedNamespaceError(namespace)


def parse(schema: str, *, op: str) -> Any:
    """Parse a schema that includes the operator's name.

    Raises:
        SchemaError: the dispatcher does not understand it.
    """
    try:
        return _torch.parse_schema(schema)
    except RuntimeError as error:
        raise SchemaError(f"{op}: invalid schema {schema!r}: {error}", op=op) from error


def mutated_arguments(schema: Any) -> list[str]:
    """Return the names of the arguments that a schema marks as mutated."""
    return [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
