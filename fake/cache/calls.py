"""Questions of the engine about the arguments and outputs of a call."""

from __future__ import annotations

from typing import Any

import torch

from fake.cache.symbolic import SymbolicMetadata
from fake.errors import CacheCrossCheckError
from fake.seam.dispatch import OpOverload, library_utils
from fake.seam.fake_tensor import assert_eq, assert_metadata_eq, in_kernel_invocation_manager
from fake.seam.pytree import tree_leaves

PURE_OPS: set[Any] = set()
"""Operators, other than torch's own, whose fake kernels depend on nothing but their arguments."""

_aten = torch.ops.aten
LIFT_OPS = (_aten.lift_fresh.default, _aten.lift_fresh_copy.default)
"""Operators that turn a constant of a program into a new tensor."""


def uncacheable_reason(func: Any) -> str | None:
    """Return why no call of an operator may be cached, or None."""
    if not isinstance(func, OpOverload):
        return "higher-order operator"
    tags = func.tags
    if torch.Tag.data_dependent_output in tags:
        return "data dependent output"
    if torch.Tag.dynamic_output_shape in tags and func is not _aten.index.Tensor:
        return "dynamic output shape"
    if torch.Tag.inplace_view in tags:
        return "inplace view"
    if func in LIFT_OPS:
        return "lift"
    if any("ScriptObject" in str(a.type) or "__torch__" in str(a.type) for a in func._schema.arguments):
        return "script object argument"
    return None


def cache_custom_op(op: Any) -> None:
    """Cache the results of a custom operator's fake kernel, in all modes and under ``accelerate``,
    from now on.

    This promises that the results depend on the arguments only: tensor metadata, and the values of numbers
    and strings. Entries are valid as long as the registered kernel is the same object.

    Args:
        op: an overload, such as ``torch.ops.mylib.op.default``.

    Raises:
        TypeError: ``op`` is not an overload of an operator.
        ValueError: it is torch's own operator, or its results can never be cached; nothing is changed.

    >>> import torch, fake
    >>> fake.cache_custom_op(torch.ops.aten.add.Tensor)
    Traceback (most recent call last):
    ...
    ValueError: cache_custom_op: aten::add.Tensor is one of torch's own operators, which are cached as they are
    """
    if not isinstance(op, OpOverload):
        raise TypeError(
            f"cache_custom_op: op has to be an overload (torch.ops.mylib.op.default), not {type(op).__name__}"
        )
    name = op.name()
    if library_utils.is_builtin(op):
        raise ValueError(
            f"cache_custom_op: {name} is one of torch's own operators, which are cached as they are"
        )
    reason = uncacheable_reason(op)
    if reason is not None:
        raise ValueError(f"cache_custom_op: results of {name} can never be cached: {reason}")
    PURE_OPS.add(op)


def is_mutable(func: Any) -> bool:
    """Return whether an operator mutates an argument."""
    return isinstance(func, OpOverload) and func._schema.is_mutable


def tensors_of(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors among the arguments, including those in lists."""
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(item for item in value if isinstance(item, torch.Tensor))
    return found


def drop_stale_metadata(args: Any, kwargs: Any) -> bool:
    """Drop cached metadata of tensors whose symbols were replaced; returns whether there was any."""
    dropped = False
    for tensor in tensors_of(args, kwargs):
        interned = getattr(tensor, "_interned", None)
        if type(interned) is SymbolicMetadata and not interned.symbols.isdisjoint(
            interned.shape_env.replacements
        ):
            tensor._interned = None  # type: ignore[attr-defined]
            dropped = True
    return dropped


def compare(func: Any, served: Any, expected: Any) -> None:
    """Compare outputs served from the cache with those of a fresh dispatch.

    Args:
        func: the operator.
        served: the outputs from the cache.
        expected: those of the fresh dispatch, of the same structure.

    Raises:
        CacheCrossCheckError: they differ.
    """
    ours, theirs = tree_leaves(served), tree_leaves(expected)
    if len(ours) != len(theirs):
        raise CacheCrossCheckError(func, f"{len(ours)} outputs, a fresh dispatch gives {len(theirs)}")
    for path, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        _compare_leaf(func, path, a, b)


def _compare_leaf(func: Any, path: int, served: Any, expected: Any) -> None:
    if not isinstance(served, torch.Tensor):
        if type(served) is not type(expected) or served != expected:
            raise CacheCrossCheckError(
                func, f"output {path} is {served!r}, a fresh dispatch gives {expected!r}"
            )
        return
    try:
        assert_metadata_eq(assert_eq, expected, served)
    except AssertionError as difference:
        raise CacheCrossCheckError(func, f"output {path}: {difference}") from difference


def handle_directly(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator that fake tensors answer by themselves.

    Args:
        mode: the mode, suspended while the operator runs.
        func: such an operator (``size``, ``stride``, ``device`` and the like).
        types: unused, so that all handlers have the same signature.
        args: positional arguments.
        kwargs: keyword arguments, or None.
    """
    with in_kernel_invocation_manager(mode):
        return func(*args, **(kwargs or {}))
