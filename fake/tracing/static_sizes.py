"""Sizes of tensors without a symbolic dimension: parameters, mostly, each converted twice per compilation.

For them ``ShapeEnv`` makes a SymPy number of each size and stride, and numbers of those again; and where Inductor tells
the strides of what a graph returns, it prints every symbol that it knows for every number that is read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fake.seam.patches import LEDGER, Patch, When, always
from fake.tracing import _torch as _t

__all__ = ["PATCHES", "all_static"]


def sizes_strides_storage_offset(
    env: Any, ex_size: Any, ex_stride: Any, ex_storage_offset: Any, *args: Any, **kwargs: Any
) -> Any:
    """The sizes themselves, where the context says that all are static and nothing else is asked of them.

    Args:
        env: the environment.
        ex_size: the example's sizes.
        ex_stride: its strides in elements.
        ex_storage_offset: its storage offset in elements.
        args: the source and what else torch's method takes.
        kwargs: likewise.

    Returns:
        Sizes, strides and offset, symbolic where the context says so.
    """
    context = kwargs.get("symbolic_context")
    if (
        context is not None
        and all_static(context)
        and not kwargs.get("hint_overrides")
        and not env.should_record_events
        and not getattr(env, "_translation_validation_enabled", False)
        and type(ex_storage_offset) is int
        and all(type(number) is int for number in (*ex_size, *ex_stride))
        and len(ex_size) == len(context.dynamic_sizes)
        and len(ex_stride) == len(context.dynamic_strides)
    ):
        return tuple(ex_size), tuple(ex_stride), ex_storage_offset
    return _original(env, ex_size, ex_stride, ex_storage_offset, *args, **kwargs)


def _numbers_first(original: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """A method that evaluates the text of an expression: a number's text is a number in any environment."""

    @functools.wraps(original)
    def read(env: Any, code: str) -> Any:
        return int(code) if code.isdecimal() else original(env, code)

    return read


def all_static(context: Any) -> bool:
    """Whether a context makes no symbol of any size or stride of a contiguous tensor."""
    return (
        isinstance(context, _t.StatelessSymbolicContext)
        and all(size is _STATIC for size in context.dynamic_sizes)
        and all(stride is _INFERRED for stride in context.dynamic_strides)
        and not any(context.constraint_sizes)
        and not any(context.constraint_strides)
        and not any(context.specialize_on or ())
    )


_original: Any = getattr(_t.ShapeEnv, "_create_symbolic_sizes_strides_storage_offset", None)
_STATIC = _t.DimDynamic.STATIC
_INFERRED = _t.DimDynamic.INFER_STRIDE
_LOST = "time: a shape environment makes a SymPy number of each static size and stride"

PATCHES = LEDGER.add(
    Patch(
        _t.ShapeEnv,
        "_create_symbolic_sizes_strides_storage_offset",
        always(sizes_strides_storage_offset),
        when=When.COMPILATION,
        lost=_LOST,
    ),
    *(
        Patch(_t.ShapeEnv, name, _numbers_first, when=When.COMPILATION, lost=_LOST)
        for name in ("evaluate_symexpr", "deserialize_symexpr")
    ),
)
