"""Hashable keys for everything that decides an operator's answer.

:func:`plain_key` is the readable reference. :func:`compile_key` generates, from an operator's schema, a
function that builds an equivalent key several times faster (a test checks that both distinguish the same
calls). Both cover the arguments (interned metadata and ``requires_grad`` of tensors, constants with their
type) and the thread's state: default dtype, inference mode, grad mode, deterministic algorithms, autocast,
Python dispatcher, default device for calls without tensors, and the settings of the mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.immutable_collections import immutable_list

from fake.cache.symbolic import metadata_of, token as symbol_token
from fake.seam import dispatch
from fake.seam.dispatch import OpOverload
from fake.seam.symbolic_shapes import HIDDEN_FILES
from fake.tensors.tensor import FakeTensor, Unkeyable

_PLAIN_TYPES = frozenset(
    (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
_NUMBERS = frozenset((int, float, bool, complex))
_LISTS = (list, tuple, torch.Size, immutable_list)

# Operators that check the size of a storage, which the metadata of a view does not contain.
_READS_STORAGE_SIZE = frozenset(
    (
        "aten::as_strided",
        "aten::as_strided_copy",
        "aten::as_strided_scatter",
        "aten::_reshape_alias",
        "prims::as_strided",
    )
)


class ModeToken:
    """The mode settings that affect answers; interned, so that keys compare it by identity."""

    __slots__ = ("settings",)

    def __init__(self, settings: tuple[Any, ...]) -> None:
        self.settings = settings

    def __reduce__(self) -> tuple[Any, ...]:
        return (_intern_token, (self.settings,))


_TOKENS: dict[tuple[Any, ...], ModeToken] = {}


def _intern_token(settings: tuple[Any, ...]) -> ModeToken:
    return _TOKENS.setdefault(settings, ModeToken(settings))


def token_of(mode: Any) -> ModeToken:
    """Return the token of a mode, recomputed whenever one of its settings changed."""
    shape_env = mode.shape_env
    token = mode._cache_token = _intern_token(
        (
            mode.allow_fallback_kernels,
            mode.allow_meta,
            mode._allow_unsafe_data_ptr_access,
            mode.static_shapes,
            getattr(mode, "allow_scalar_outputs", False),
            None if shape_env is None else shape_env.settings,
        )
    )
    return token


def thread_state(mode: Any) -> tuple[Any, ...]:
    """Return everything that an operator may read besides its arguments."""
    return (
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        dispatch.deterministic_algorithms() and (True, dispatch.deterministic_only_warns()),
        dispatch.autocast_state(),
        dispatch.is_python_dispatcher_enabled(),
        mode._cache_token or token_of(mode),
    )


def plain_key(
    func: Any, mode: Any, args: Any, kwargs: Any, tensor_class: type = FakeTensor
) -> tuple[Any, ...]:
    """Return the key of a call, built without shortcuts.

    Args:
        func: the operator.
        mode: the mode of the call.
        args: positional arguments.
        kwargs: keyword arguments, or None.
        tensor_class: the class of fake tensors that the engine serves.

    Returns:
        A hashable tuple; equal keys of one operator have equal answers.

    Raises:
        Unkeyable: an argument cannot be described by any key.
    """
    parts: list[Any] = []
    _append(parts, tuple(args), mode, tensor_class)
    for name, value in (kwargs or {}).items():
        parts.append(name)
        _append(parts, value, mode, tensor_class)
    if _reads_storage_size(func):
        parts.append(_storage_bytes(args, kwargs))
    return (*parts, *thread_state(mode), dispatch.get_default_device())


def _append(parts: list[Any], value: Any, mode: Any, tensor_class: type) -> None:
    kind: Any = type(value)
    if kind is tensor_class:
        if value.fake_mode is not mode:
            raise Unkeyable("not our fake")
        parts.append(value._interned or metadata_of(value))
        parts.append(value.requires_grad)
        parts.append(value.is_neg())
    elif kind in _LISTS:
        parts.append(list)
        parts.append(len(value))
        for item in value:
            _append(parts, item, mode, tensor_class)
    elif kind in _PLAIN_TYPES:
        parts.append(kind)
        parts.append(value)
    elif kind is torch.Generator:
        parts.append(kind)
        parts.append(value.device)
    elif isinstance(value, torch.Tensor):
        raise Unkeyable("non-fake tensor")
    elif kind is torch.SymInt:
        parts.append(symbol_token(value))
    elif kind in (torch.SymFloat, torch.SymBool):
        raise Unkeyable("symbolic shape")
    else:
        raise Unkeyable(f"{kind.__name__} argument")


def _scalar(value: Any) -> Any:
    """Return the type of a number passed where the schema says Tensor (or None)."""
    kind = type(value)
    if kind in _NUMBERS:
        return kind
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        raise Unkeyable("non-fake tensor")
    raise Unkeyable("symbolic shape")


def _integers(values: Any) -> Any:
    """Return a tuple of integers and tokens."""
    if values is None:
        return None
    if type(values) is int:  # a schema type such as int[2] accepts one number for all
        return values
    if type(values) is torch.SymInt:
        return symbol_token(values)
    key = tuple(values)
    for item in key:
        if type(item) is not int:
            return tuple([symbol_token(item) for item in key])
    return key


def _numbers(values: Any) -> Any:
    """Return a tuple of floats or flags."""
    if values is None:
        return None
    if not SYMBOLIC.isdisjoint(map(type, values)):
        raise Unkeyable("symbolic number")
    return tuple(values)


def _storage_bytes(args: Any, kwargs: Any) -> Any:
    for value in (*args, *(kwargs or {}).values()):
        if isinstance(value, torch.Tensor):
            return symbol_token(value.untyped_storage().nbytes())
    return None


def _reads_storage_size(func: Any) -> bool:
    return isinstance(func, OpOverload) and func._schema.name in _READS_STORAGE_SIZE


_VALUE_KINDS = frozenset(("int", "bool", "str", "float", "Device", "Layout", "MemoryFormat", "ScalarType"))
_VALUES = _VALUE_KINDS | {f"Optional[{kind}]" for kind in _VALUE_KINDS}
_MAY_BE_SYMBOLIC = frozenset(("bool", "float", "Optional[bool]", "Optional[float]"))
SYMBOLIC = frozenset((torch.SymInt, torch.SymFloat, torch.SymBool))
"""Numbers whose values belong to a shape environment: the process-wide tables must not hold them."""
_SYMINTS = frozenset(("SymInt", "Optional[SymInt]"))
_NUMBER_KINDS = frozenset(("number", "Optional[number]"))
_TENSORS = frozenset(("Tensor", "Optional[Tensor]"))
_INT_LISTS = frozenset(("List[SymInt]", "Optional[List[SymInt]]", "List[int]", "Optional[List[int]]"))
_VALUE_LISTS = frozenset(("List[bool]", "Optional[List[float]]", "List[float]"))
_TENSOR_LISTS = frozenset(("List[Tensor]", "List[Optional[Tensor]]"))


def _argument_code(index: int, kind: str) -> tuple[list[str], list[str]] | None:
    """Return statements and key items for one positional argument of a schema type;
    None if only the plain key works."""
    value = f"a{index}"
    if kind in _TENSORS:
        lines = [
            f"if type({value}) is F and {value}.fake_mode is mode:",
            f" k{index} = {value}._interned or metadata_of({value}); g{index} = {value}.requires_grad",
            f" if {value}.is_neg(): raise Unkeyable('negative bit')",
            "else:",
            f" k{index} = scalar({value}); g{index} = {value}",
        ]
        return lines, [f"k{index}", f"g{index}"]
    if kind in _VALUES:
        may_be_symbolic = kind in _MAY_BE_SYMBOLIC
        return (
            [f"if type({value}) in SYMBOLIC: raise Unkeyable('symbolic number')"] if may_be_symbolic else []
        ), [value]
    if kind in _SYMINTS:
        return [f"if type({value}) is SymInt: {value} = symbol_token({value})"], [value]
    if kind in _NUMBER_KINDS:
        lines = [
            f"t{index} = type({value})",
            f"if t{index} is SymInt: {value} = symbol_token({value})",
            f"elif t{index} in SYMBOLIC: raise Unkeyable('symbolic number')",
        ]
        return lines, [value, f"t{index}"]
    if kind in _INT_LISTS:
        return [f"k{index} = integers({value})"], [f"k{index}"]
    if kind in _VALUE_LISTS:
        return [f"k{index} = numbers({value})"], [f"k{index}"]
    if kind in _TENSOR_LISTS:
        return [f"k{index} = tensors({value}, mode)"], [f"k{index}"]
    return None


def _tensor_list_key(tensor_class: type) -> Callable:
    def tensors(values: list[Any], mode: Any) -> tuple[Any, ...]:
        parts: list[Any] = []
        for value in values:
            if value is None:
                parts.append(None)
                continue
            kind: Any = type(value)
            if kind is not tensor_class or value.fake_mode is not mode:
                raise Unkeyable("not our fake")
            parts.append(value._interned or metadata_of(value))
            parts.append(value.requires_grad)
            if value.is_neg():
                raise Unkeyable("negative bit")
        return tuple(parts)

    return tensors


def compile_key(func: Any, tensor_class: type) -> tuple[str, dict[str, Any]]:
    """Return the source of statements that set ``key`` from ``mode``, ``args`` and ``kwargs``,
    and the names they use.

    The source is indented by eight spaces, for use in a handler (see ``cached_dispatch.py``).
    """
    positional = [str(a.type) for a in func._schema.arguments if not a.kwarg_only]
    keyword = [str(a.type) for a in func._schema.arguments if a.kwarg_only]
    simple_keywords = all(kind in _VALUES or kind in _NUMBER_KINDS for kind in keyword)
    state = "get_default_dtype(), is_inference(), is_grad(), deterministic() and (True, only_warns()), "
    state += "any_autocast() and autocast(), "
    state += "python_dispatcher(), mode._cache_token or token_of(mode)"
    lines: list[str] = ["n = len(args)"]
    branch = "if"
    required = sum(not a.kwarg_only and not a.has_default_value() for a in func._schema.arguments)
    for count in range(len(positional), required - 1, -1):  # fewer if some are passed by name
        pieces = [_argument_code(i, kind) for i, kind in enumerate(positional[:count])]
        if any(piece is None for piece in pieces):
            continue
        lines.append(f"{branch} n == {count}:")
        branch = "elif"
        if count:
            lines.append(" " + ", ".join(f"a{i}" for i in range(count)) + ", = args")
        items = [str(count)]
        for piece in pieces:
            assert piece is not None
            lines.extend(" " + line for line in piece[0])
            items.extend(piece[1])
        if not any(kind in _TENSORS or kind in _TENSOR_LISTS for kind in positional[:count]):
            items.append("get_default_device()")
        if _reads_storage_size(func):
            items.append("storage_bytes(args, kwargs)")
        body = ", ".join(items)
        lines.append(f" if not kwargs: key = ({body}, {state})")
        if simple_keywords:
            if any(kind in _MAY_BE_SYMBOLIC or kind in _NUMBER_KINDS for kind in keyword):
                lines.append(" elif not SYMBOLIC.isdisjoint(map(type, kwargs.values())):")
                lines.append("  raise Unkeyable('symbolic number')")
            types = (
                "*[type(v) for v in kwargs.values()], "
                if any(kind in _NUMBER_KINDS for kind in keyword)
                else ""
            )
            lines.append(f" else: key = ({body}, *kwargs, *kwargs.values(), {types}{state})")
        else:
            lines.append(" else: key = plain_key(func, mode, args, kwargs, F)")
    lines.append(f"{'else' if branch == 'elif' else 'if True'}:")
    lines.append(" key = plain_key(func, mode, args, kwargs, F)")
    names = {
        "F": tensor_class,
        "SYMBOLIC": SYMBOLIC,
        "SymInt": torch.SymInt,
        "Unkeyable": Unkeyable,
        "any_autocast": dispatch.is_any_autocast_enabled,
        "autocast": dispatch.autocast_state,
        "deterministic": dispatch.deterministic_algorithms,
        "get_default_device": dispatch.get_default_device,
        "get_default_dtype": torch.get_default_dtype,
        "integers": _integers,
        "is_grad": torch.is_grad_enabled,
        "is_inference": torch.is_inference_mode_enabled,
        "metadata_of": metadata_of,
        "numbers": _numbers,
        "only_warns": dispatch.deterministic_only_warns,
        "plain_key": plain_key,
        "python_dispatcher": dispatch.is_python_dispatcher_enabled,
        "scalar": _scalar,
        "storage_bytes": _storage_bytes,
        "symbol_token": symbol_token,
        "tensors": _tensor_list_key(tensor_class),
        "token_of": token_of,
    }
    return "".join(" " * 8 + line + "\n" for line in lines), names


HANDLER = """
def make(func, get, hit, miss, symbolic_lookup, {names}):
    def handler(mode, func, types, args, kwargs):
{before}      try:
{key}        rebuild = get(key)
      except Unkeyable as reason:
        return miss(mode, func, types, args, kwargs, None, reason.reason)
      except (TypeError, AttributeError):
        return miss(mode, func, types, args, kwargs, None, "unhashable argument")
      if rebuild is None: return symbolic_lookup(mode, func, types, args, kwargs, key)
      if rebuild.__class__ is not Bypass: hit()
      return rebuild(mode, args, kwargs)
    return handler
"""
"""Source of an operator's handler, with the key computed inline, so that a hit makes no call for it.
Compiling it takes longer than most operators' first dispatch, so code that a hit does not need is
elsewhere."""

FORMULA_BYPASS = """\
      if type(autograd_node()) in FORMULAS:
        return miss(mode, func, types, args, kwargs, None, "formula of autograd")
"""
"""Runs before the key: which formula calls the operator decides the strides of its result."""


def compile_make(code: str, file: str) -> Callable[..., Any]:
    """Return the function ``make`` of generated code, whose frames are hidden from users."""
    HIDDEN_FILES.add(file)
    namespace: dict[str, Any] = {}
    exec(compile(code, file, "exec"), namespace)
    made: Callable[..., Any] = namespace["make"]
    return made
