"""Lean symbolic integers: torch's ``SymNode`` with the repeated work remembered.

A traced model asks the same questions of the same sizes thousands of times. Per shape environment this keeps

- one *canonical* node for each expression, and for each ``(operation, node, node)`` the canonical result;
- one node for each integer constant;
- on a canonical boolean, the answer that a guard was recorded for.

Results are handed out as copies that point to the canonical node, never as the node itself: code that looks sizes up
by the identity of their nodes would otherwise tie together sizes that only happen to be equal. Nothing is remembered
while guards are suppressed or ``make_fx`` records symbolic arithmetic, and nothing about unbacked symbols.

:func:`patches` lists what to replace; ``fake.acceleration`` puts it in place and takes it out again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import _torch as _t

__all__ = ["LeanState", "lean_state", "patches"]

_BINARY = (
    "add", "sub", "mul", "mod", "eq", "ne", "gt", "lt", "le", "ge", "sym_min", "sym_max", "int_floordiv", "and_", "or_",
)  # fmt: skip
_DUNDERS = ("add", "sub", "mul", "mod", "eq", "ne", "lt", "gt", "le", "ge")
_REFLECTED = ("add", "sub", "mul", "mod")

SymNode, ShapeEnv = _t.SymNode, _t.ShapeEnv


class LeanState:
    """What is remembered for one shape environment (it lives on the environment and goes with it)."""

    __slots__ = ("canonical", "integers", "results")

    def __init__(self) -> None:
        self.canonical: dict[Any, Any] = {}
        self.integers: dict[int, Any] = {}
        self.results: dict[Any, Any] = {}

    def __deepcopy__(self, memo: dict) -> LeanState:
        return LeanState()

    def __reduce__(self) -> tuple[Any, ...]:
        return (LeanState, ())


def lean_state(shape_env: Any) -> LeanState:
    """The state of a shape environment, made at its first use."""
    state = shape_env.__dict__.get("_fake_lean")
    if state is None:
        state = shape_env.__dict__["_fake_lean"] = LeanState()
    return state


def _applies(shape_env: Any) -> bool:
    """Whether results may be remembered: nobody watches the arithmetic itself."""
    return (
        shape_env is not None
        and not shape_env._translation_validation_enabled
        and not _t.symbolic_arithmetic_is_watched()
    )


def _canonical(node: Any, state: LeanState) -> Any:
    key = (node.expr, node.pytype, node.constant is None)
    return state.canonical.setdefault(key, node)


def _copy(node: Any) -> Any:
    """A node of its own that points to the canonical one; constants are shared."""
    if node.constant is not None:
        return node
    made = object.__new__(SymNode)
    made.__dict__.update(node.__dict__)
    made.__dict__["_canonical"] = node
    return made


def _binary(name: str, original: Callable) -> Callable:
    def lean(self: Any, other: Any) -> Any:
        shape_env = self.shape_env
        if type(other) is not SymNode or not _applies(shape_env):
            return original(self, other)
        state = lean_state(shape_env)
        key = (name, self._canonical or self, getattr(other, "_canonical", None) or other)
        result = state.results.get(key)
        if result is None:
            left, right = _canonical(self, state), _canonical(other, state)
            inner = (name, left, right)
            result = state.results.get(inner)
            if result is None:
                result = original(left, right)
                if not result._optimized_summation:
                    result = _canonical(result, state)
                state.results[inner] = result
            state.results[key] = result
        return _copy(result)

    lean.__name__ = name
    return lean


def _sizes(name: str, original: Callable) -> Callable:
    def lean(self: Any, sizes: Any, strides: Any) -> Any:
        shape_env = self.shape_env
        if not _applies(shape_env):
            return original(self, sizes, strides)
        results = lean_state(shape_env).results
        key = (name, tuple([n._canonical or n for n in sizes]), tuple([n._canonical or n for n in strides]))
        result = results.get(key)
        if result is None:
            result = results[key] = original(self, sizes, strides)
        return result

    lean.__name__ = name
    return lean


def _wrap_int(original: Callable) -> Callable:
    def wrap_int(self: Any, num: int) -> Any:
        shape_env = self.shape_env
        if shape_env is None or type(num) is not int or shape_env._translation_validation_enabled:
            return original(self, num)
        integers = lean_state(shape_env).integers
        node = integers.get(num)
        if node is None:
            node = integers[num] = original(self, num)
        return node

    return wrap_int


def _maybe_as_int(original: Callable) -> Callable:
    def maybe_as_int(self: Any) -> int | None:
        shape_env = self.shape_env
        if shape_env is None:
            return original(self)
        own = self.__dict__
        version = len(shape_env.replacements)
        if own.get("_as_int_version") != version:
            own["_as_int"] = original(self)
            own["_as_int_version"] = version
        return own["_as_int"]

    return maybe_as_int


def _expr(original: property) -> property:
    read = original.fget
    assert read is not None

    def expr(self: Any) -> Any:
        """The expression with replacements: looked at again only if one of its own symbols was replaced."""
        shape_env = self.shape_env
        if shape_env is None:
            return read(self)
        version = len(shape_env.replacements)  # a symbol that is replaced stays replaced
        if version == 0:
            return self._expr
        own = self.__dict__
        if own.get("_current_version") == version:
            return own["_current"]
        current = own.get("_current", self._expr)
        if not getattr(current, "free_symbols", frozenset()).isdisjoint(shape_env.replacements):
            current = shape_env.replace(current)
        own["_current"], own["_current_version"] = current, version
        return current

    return property(expr)


def _may_remember(node: Any) -> bool:
    """Whether the answer for a node is now a guard of the environment: it is backed, and guards are recorded."""
    return node._hint is not None and not _t.guards_are_suppressed()


def _remembered(name: str, slot: str, original: Callable) -> Callable:
    def lean(self: Any, file: str, line: int) -> Any:
        memory = (self._canonical or self).__dict__
        answer = memory.get(slot)
        if answer is None:
            answer = original(self, file, line)
            if _may_remember(self) and not _t.backed_size_oblivious() and (slot != "_expected" or answer):
                memory[slot] = answer
        return answer

    lean.__name__ = name
    return lean


def _evaluate(original: Callable) -> Callable:
    def evaluate_sym_node(
        self: Any, sym_node: Any, size_oblivious: bool = False, fallback_value: bool | None = None
    ) -> Any:
        if size_oblivious:
            return original(self, sym_node, size_oblivious, fallback_value)
        memory = (getattr(sym_node, "_canonical", None) or sym_node).__dict__
        answer = memory.get("_evaluated")
        if answer is None:
            answer = original(self, sym_node, size_oblivious, fallback_value)
            if _may_remember(sym_node) and not _t.backed_size_oblivious():
                memory["_evaluated"] = answer
        return answer

    return evaluate_sym_node


def _wrap(node: Any) -> Any:
    kind = node.pytype
    return (
        torch.SymInt(node) if kind is int else torch.SymBool(node) if kind is bool else torch.SymFloat(node)
    )


def _dunder(method: str, original: Callable, *, reflected: bool) -> Callable:
    def lean(self: Any, other: Any) -> Any:
        node = self.node
        if type(node) is not SymNode:
            return original(self, other)
        if type(other) is int:
            operand = node.wrap_int(other)
        elif type(other) is torch.SymInt and not reflected and type(other.node) is SymNode:
            operand = other.node
        else:
            return original(self, other)
        result = getattr(operand, method)(node) if reflected else getattr(node, method)(operand)
        return result.constant if result.constant is not None else _wrap(result)

    lean.__name__ = original.__name__
    return lean


def patches() -> list[tuple[Any, str, Any]]:
    """Attributes of torch and what to put there (owner, name, value), while torch's own are in place."""
    node = vars(SymNode)
    found: list[tuple[Any, str, Any]] = [(SymNode, "_canonical", None)]
    found += [(SymNode, name, _binary(name, node[name])) for name in _BINARY if name in node]
    found += [(SymNode, name, _sizes(name, node[name])) for name in _t.sizes_strides_methods if name in node]
    found += [
        (SymNode, "wrap_int", _wrap_int(node["wrap_int"])),
        (SymNode, "maybe_as_int", _maybe_as_int(node["maybe_as_int"])),
        (SymNode, "expr", _expr(node["expr"])),
        (SymNode, "guard_bool", _remembered("guard_bool", "_answer", node["guard_bool"])),
        (SymNode, "expect_true", _remembered("expect_true", "_expected", node["expect_true"])),
        (SymNode, "guard_or_false", _remembered("guard_or_false", "_answer", node["guard_or_false"])),
        (SymNode, "guard_or_true", _remembered("guard_or_true", "_answer", node["guard_or_true"])),
        (ShapeEnv, "evaluate_sym_node", _evaluate(ShapeEnv.evaluate_sym_node)),
    ]
    symint = vars(torch.SymInt)
    for name in _DUNDERS:
        found.append((torch.SymInt, f"__{name}__", _dunder(name, symint[f"__{name}__"], reflected=False)))
    for name in _REFLECTED:
        found.append((torch.SymInt, f"__r{name}__", _dunder(name, symint[f"__r{name}__"], reflected=True)))
    found.append((_t.FunctionalTensor, "__new__", staticmethod(_functional_new)))
    return found


_FUNCTIONAL_NEW = _t.FunctionalTensor.__new__


def _functional_new(cls: type, elem: Any, mode: Any) -> Any:
    """FunctionalTensor's constructor; with the storage size given, torch asks a symbolic tensor fewer questions."""
    if (
        not _t.has_symbols(elem)
        or torch.is_inference_mode_enabled()
        or not torch._is_functional_tensor(elem)
        or elem.layout is not torch.strided
    ):
        return _FUNCTIONAL_NEW(cls, elem, mode)
    return _t.make_symbolic_functional(cls, elem)
