"""The two faces of an operator with extended argument types: the author's signature and the flat schema.

Kernels, fake kernels, ``setup_context``, backward formulas and vmap rules are written against the author's
signature; the adaptors here stand between them and the dispatcher, which sees the flat one.
"""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter
from typing import Any

import torch

from fake.library.arguments import Codec, make_codec
from fake.library.errors import SchemaError, UnsupportedAnnotationError
from fake.library.schema import annotation_text, infer_schema, supported_annotations

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
    """Whether a parameter of ``fn`` is of an extended type."""
    annotations = _annotations(fn)
    codecs = [make_codec(name, a) for name, a in annotations.items() if name != "return"]
    return any(c is not None and (c.kind != "plain" or "str[]" in c.leaves[0].schema_type) for c in codecs)


class ArgumentLayout:
    """Which leaves of the flat schema belong to which parameter.

    Attributes:
        signature: the author's.
        codecs: one a parameter, in order.
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
        """The flat schema without the operator's name.

        ``mutates_args`` may name parameters (all their tensors) or single leaves.

        Raises:
            SchemaError: it names something else, or a leaf that is no tensor.
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
        """Flat positional and keyword-only arguments of a call of the author's signature."""
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
        """The author's positional arguments."""
        return tuple(c.rebuild(part) for c, part in zip(self._positional, self._split(flat), strict=True))

    def _split(self, flat: Sequence[Any]) -> list[Sequence[Any]]:
        parts = []
        position = 0
        for codec in self._positional:
            parts.append(flat[position : position + len(codec.leaves)])
            position += len(codec.leaves)
        return parts

    def rebuild_keywords(self, flat: dict[str, Any]) -> dict[str, Any]:
        """The author's keyword-only arguments."""
        return {n: c.rebuild([flat[leaf.name] for leaf in c.leaves]) for n, c in self._keyword_only.items()}

    # --- adaptors ----------------------------------------------------------------------------------
    def adapt_kernel(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A kernel or fake kernel for the flat schema."""

        @functools.wraps(fn)
        def kernel(*flat: Any, **keywords: Any) -> Any:
            return fn(*self.rebuild_positional(flat), **self.rebuild_keywords(keywords))

        del kernel.__wrapped__  # its signature is the flat one
        return kernel

    def adapt_setup_context(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``setup_context`` with rebuilt inputs."""

        def setup_context(
            ctx: Any, inputs: Sequence[Any], output: Any, keyword_only_inputs: Any = None
        ) -> None:
            rebuilt = self.rebuild_positional(inputs)
            if keyword_only_inputs is None:
                fn(ctx=ctx, inputs=rebuilt, output=output)
            else:
                keywords = self.rebuild_keywords(keyword_only_inputs)
                fn(ctx=ctx, inputs=rebuilt, keyword_only_inputs=keywords, output=output)

        return setup_context

    def adapt_backward(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A backward formula that returns one gradient a parameter, None or in the parameter's structure."""

        def backward(ctx: Any, *grads: Any) -> Any:
            result = fn(ctx, *grads)
            parts = result if isinstance(result, tuple) else (result,)
            flat: list[Any] = []
            for codec, part in zip(self._positional, parts, strict=True):
                flat += codec.flatten_grads(part)
            return tuple(flat)

        return backward

    def adapt_vmap(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A vmap rule; the batch dimensions of an extended parameter come in its structure."""

        def rule(info: Any, in_dims: Sequence[Any], *flat: Any, **keywords: Any) -> Any:
            dims = tuple(c.structure(p) for c, p in zip(self._positional, self._split(in_dims), strict=True))
            return fn(info, dims, *self.rebuild_positional(flat), **self.rebuild_keywords(keywords))

        return rule
