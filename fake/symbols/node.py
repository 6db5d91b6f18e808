"""Lean symbolic integers: torch's ``SymNode`` with the repeated work remembered.

A traced model asks the same questions of the same sizes thousands of times. Per shape environment this keeps

- one *canonical* node for each expression, and for each ``(operation, node, node)`` the canonical result;
- one node for each integer constant;
- on a canonical boolean, the answer that a guard was recorded for.

Results are handed out as copies that point to the canonical node, never as the node itself: code that looks sizes up
by the identity of their nodes would otherwise tie together sizes that only happen to be equal. Nothing is remembered
while guards are suppressed, while the environment is frozen (its facts may be withdrawn), or while ``make_fx`` records
symbolic arithmetic; no answer is remembered about unbacked symbols.

There are two ways to the same methods. :class:`LeanNode` is a subclass of torch's node; :func:`adopt` turns the nodes
of a symbolic number into lean ones, with any shape environment. :func:`patches` lists what to replace on torch's own
class, for ``fake.acceleration``, which has to serve nodes that torch makes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from .. import _torch as _t

__all__ = ["OPERATORS", "LeanNode", "LeanState", "adopt", "lean_state", "patches"]

_BINARY = (
    "add", "sub", "mul", "mod", "eq", "ne", "gt", "lt", "le", "ge", "sym_min", "sym_max", "int_floordiv", "and_", "or_",
)  # fmt: skip
_UNARY = ("neg", "sym_not", "sym_float", "abs")
_DUNDERS = {
    **{f"__{name}__": name for name in ("add", "sub", "mul", "mod", "eq", "ne", "lt", "gt", "le", "ge")},
    "__floordiv__": "int_floordiv",
}
_REFLECTED = {
    **{f"__r{name}__": name for name in ("add", "sub", "mul", "mod")},
    "__rfloordiv__": "int_floordiv",
}

SymNode, ShapeEnv = _t.SymNode, _t.ShapeEnv


class LeanState:
    """What is remembered for one shape environment (it lives on the environment and goes with it).

    Attributes:
        adopts: whether nodes that torch makes for the environment become lean when they are met.
        log: whoever wants to know which remembered answers are used, or None (see ``fake.cache.questions``).
    """

    __slots__ = ("adopts", "canonical", "integers", "log", "results")

    def __init__(self) -> None:
        self.adopts = False
        self.canonical: dict[Any, Any] = {}
        self.integers: dict[int, Any] = {}
        self.results: dict[Any, Any] = {}
        self.log: Any = None

    def __deepcopy__(self, memo: dict) -> LeanState:
        return LeanState()

    def __reduce__(self) -> tuple[Any, ...]:
        return (LeanState, ())


def lean_state(shape_env: Any) -> LeanState:
    """The state of a shape environment, made at its first use."""
    try:
        return shape_env._fake_lean
    except AttributeError:
        state = shape_env._fake_lean = LeanState()
        return state


def _canonical_of(node: Any, state: LeanState) -> Any:
    """The one node for an expression, remembered on ``node``."""
    found = state.canonical.setdefault((node.expr, node.pytype, node.constant is None), node)
    node.__dict__["_canonical"] = found
    return found


def _copy(node: Any) -> Any:
    """A node of its own that shares all attributes with a canonical one; constants are shared whole."""
    if node.constant is not None:
        return node
    made = object.__new__(node.__class__)
    # One dictionary for both: whatever is learned about an expression holds for all nodes that stand for it.
    made.__dict__ = node.__dict__
    return made


def _keep(result: Any, asked: Any, state: LeanState) -> Any:
    """A result of torch's own arithmetic, as lean as the node that was asked, and canonical."""
    if result.__class__ is SymNode:
        result.__class__ = asked.__class__
    if result._optimized_summation:
        # Marked for a quicker way to add to it: an equal node without the mark must not stand for it.
        result.__dict__["_canonical"] = result
        return result
    return _canonical_of(result, state)


def _binary(name: str, original: Callable) -> Callable:
    watched, new = _t.symbolic_arithmetic_is_watched, object.__new__

    def lean(self: Any, other: Any) -> Any:
        try:
            result = self.shape_env._fake_lean.results[name, self._canonical, other._canonical]
        except (AttributeError, KeyError):
            return compute(self, other)
        if watched():
            return original(self, other)
        if result.constant is not None:
            return result
        made = new(result.__class__)
        made.__dict__ = result.__dict__
        return made

    def compute(self: Any, other: Any) -> Any:
        shape_env = self.shape_env
        if (
            shape_env is None
            or (other.__class__ is not SymNode and other.__class__ is not LeanNode)
            or shape_env._translation_validation_enabled
            or watched()
        ):
            return original(self, other)
        state = lean_state(shape_env)
        left, right = _canonical_of(self, state), _canonical_of(other, state)
        result = state.results.get((name, left, right))
        if result is None:
            for node in (left, right):
                if node._optimized_summation and not node.expr.is_Add:
                    node._optimized_summation = (
                        False  # replaced by one symbol or number; torch forgets the mark
                    )
            result = state.results[name, left, right] = _keep(original(left, right), self, state)
            if right.constant.__class__ is int:  # the operators of SymInt look for the number itself
                state.results[name, left, right.constant] = result
            if left.constant.__class__ is int:
                state.results[name, left.constant, right] = result
        return _copy(result)

    lean.__name__ = name
    return lean


def _unary(name: str, original: Callable) -> Callable:
    def lean(self: Any) -> Any:
        shape_env = self.shape_env
        if (
            shape_env is None
            or shape_env._translation_validation_enabled
            or _t.symbolic_arithmetic_is_watched()
        ):
            return original(self)
        state = lean_state(shape_env)
        key = (name, getattr(self, "_canonical", None) or _canonical_of(self, state))
        result = state.results.get(key)
        if result is None:
            result = state.results[key] = _keep(original(key[1]), self, state)
        return _copy(result)

    lean.__name__ = name
    return lean


def _sizes(name: str, original: Callable) -> Callable:
    def lean(self: Any, sizes: Any, strides: Any) -> Any:
        shape_env = self.shape_env
        if (
            shape_env is None
            or shape_env._translation_validation_enabled
            or _t.symbolic_arithmetic_is_watched()
        ):
            return original(self, sizes, strides)
        results = lean_state(shape_env).results
        key = (
            name,
            tuple([getattr(n, "_canonical", None) or n for n in sizes]),
            tuple([getattr(n, "_canonical", None) or n for n in strides]),
        )
        result = results.get(key)
        if result is None:
            result = results[key] = original(self, sizes, strides)
            if result.__class__ is SymNode:
                result.__class__ = self.__class__
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
            node.__class__ = self.__class__
        return node

    return wrap_int


def _maybe_as_int(original: Callable) -> Callable:
    version_of = _t.replacements_version

    def maybe_as_int(self: Any) -> int | None:
        own, shape_env = self.__dict__, self.shape_env
        if shape_env is None:
            return original(self)
        version = version_of(shape_env)
        if own.get("_as_int_version") == version:
            return own["_as_int"]
        answer = original(self)
        if not shape_env.frozen:  # what a frozen environment knows may be withdrawn without a new version
            own["_as_int"], own["_as_int_version"] = answer, version
        return answer

    return maybe_as_int


def _expr(original: property) -> property:
    read = original.fget
    assert read is not None
    version_of = _t.replacements_version

    def expr(self: Any) -> Any:
        """The expression with replacements: looked at again only if one of its own symbols was replaced."""
        shape_env = self.shape_env
        if shape_env is None:
            return read(self)
        version = version_of(shape_env)
        if version == 0:
            return self._expr
        own = self.__dict__
        if own.get("_current_version") == version:
            return own["_current"]
        if shape_env.frozen:
            return read(self)
        current = own.get("_current", self._expr)
        if not getattr(current, "free_symbols", frozenset()).isdisjoint(shape_env.replacements):
            current = shape_env.replace(current)
        own["_current"], own["_current_version"] = current, version
        return current

    return property(expr)


def _may_remember(node: Any) -> bool:
    """Whether the answer for a node is now a guard of the environment, or follows from its guards, for good."""
    shape_env = node.shape_env
    return (
        node._hint.__class__ in (bool, int, float)
        and not shape_env.frozen  # guards are not recorded, and what is known may be withdrawn
        and not _t.guards_are_suppressed()
        and not _t.backed_size_oblivious()
        and node.expr.free_symbols <= shape_env.backed_var_to_val.keys()
    )


def _tell(node: Any, answer: Any) -> None:
    """Mention a remembered answer to whoever listens."""
    log = lean_state(node.shape_env).log
    if log is not None:
        log.remembered(node.expr, answer)


def _memory(node: Any) -> dict[str, Any]:
    """Where answers about an expression are kept: all copies of a canonical node share it."""
    return (getattr(node, "_canonical", None) or node).__dict__


def _remembered(name: str, slot: str, original: Callable) -> Callable:
    def lean(self: Any, file: str, line: int) -> Any:
        memory = _memory(self)
        answer = memory.get(slot)
        if answer is None:
            answer = original(self, file, line)
            if _may_remember(self) and (slot != "_expected" or answer):
                memory[slot] = answer
        else:
            _tell(self, answer)
        return answer

    lean.__name__ = name
    return lean


def _evaluate_node(original: Callable) -> Callable:
    def evaluate(self: Any, size_oblivious: bool = False) -> Any:
        if size_oblivious:
            return original(self, size_oblivious)
        memory = _memory(self)
        answer = memory.get("_evaluated")
        if answer is None:
            answer = original(self, size_oblivious)
            if _may_remember(self):
                memory["_evaluated"] = answer
        else:
            _tell(self, answer)
        return answer

    return evaluate


def _evaluate(original: Callable) -> Callable:
    def evaluate_sym_node(
        self: Any, sym_node: Any, size_oblivious: bool = False, fallback_value: bool | None = None
    ) -> Any:
        if size_oblivious:
            return original(self, sym_node, size_oblivious, fallback_value)
        memory = _memory(sym_node)
        answer = memory.get("_evaluated")
        if answer is None:
            answer = original(self, sym_node, size_oblivious, fallback_value)
            if _may_remember(sym_node):
                memory["_evaluated"] = answer
        else:
            _tell(sym_node, answer)
        return answer

    return evaluate_sym_node


def _methods() -> dict[str, Any]:
    """The lean form of every hot method of torch's node."""
    node = vars(SymNode)
    found: dict[str, Any] = {"_canonical": None}
    found |= {name: _binary(name, node[name]) for name in _BINARY if name in node}
    found |= {name: _unary(name, node[name]) for name in _UNARY if name in node}
    found |= {name: _sizes(name, node[name]) for name in _t.sizes_strides_methods if name in node}
    found["wrap_int"] = _wrap_int(node["wrap_int"])
    found["maybe_as_int"] = _maybe_as_int(node["maybe_as_int"])
    found["expr"] = _expr(node["expr"])
    for name in ("guard_bool", "guard_or_false", "guard_or_true"):
        found[name] = _remembered(name, "_answer", node[name])
    found["expect_true"] = _remembered("expect_true", "_expected", node["expect_true"])
    return found


def _hint(original: property) -> property:
    read = original.fget
    assert read is not None

    def hint(self: Any) -> Any:
        """The value at hand, for whoever decides by it without a guard: only torch's own symbols do so unseen."""
        state = getattr(self.shape_env, "_fake_lean", None)
        value = read(self)
        if state is None or state.log is None:
            return value
        if sys._getframe(1).f_code.co_filename not in _OWN_FILES:
            state.log.hint_read(self.expr, value)
        return value

    return property(hint)


_OWN_FILES = frozenset(
    function.__code__.co_filename for function in (SymNode.__init__, ShapeEnv.evaluate_sym_node)
)


def _also_lean(original: Callable) -> Callable:
    def lean(self: Any, *args: Any) -> Any:
        result = original(self, *args)
        if result.__class__ is SymNode:
            result.__class__ = LeanNode
        return result

    lean.__name__ = original.__name__
    return lean


LeanNode: Any = type(
    "LeanNode",
    (SymNode,),
    {
        **{name: _also_lean(method) for name, method in vars(SymNode).items() if name in _t.magic_methods},
        **_methods(),
        "hint": _hint(vars(SymNode)["hint"]),
        "evaluate": _evaluate_node(vars(SymNode)["evaluate"]),
        "__doc__": "torch's node of a symbolic number with the repeated work remembered.",
        "__module__": __name__,
    },
)


def adopt(value: Any) -> Any:
    """Make a symbolic number lean, in place; anything else is left alone. Returns ``value``.

    >>> from torch.fx.experimental.symbolic_shapes import ShapeEnv
    >>> adopt(ShapeEnv().create_unbacked_symint()).node.__class__.__name__
    'LeanNode'
    """
    if isinstance(value, (torch.SymInt, torch.SymBool, torch.SymFloat)) and value.node.__class__ is SymNode:
        value.node.__class__ = LeanNode
        OPERATORS.keep()
    return value


_NUMBERS = {int: torch.SymInt, bool: torch.SymBool, float: torch.SymFloat}


def _operator(method: str, original: Callable, *, reflected: bool) -> Callable:
    """``a + b``: from what is remembered if it can be, else through the node, else as torch does it."""
    watched = _t.symbolic_arithmetic_is_watched
    symbolic, numbers, new = torch.SymInt, _NUMBERS, object.__new__

    def lean(self: Any, other: Any) -> Any:
        node = self.node
        left = getattr(node, "_canonical", None)
        if left is not None and not watched():
            right = other
            if other.__class__ is not int:
                right = getattr(other.node, "_canonical", None) if other.__class__ is symbolic else None
            state = getattr(node.shape_env, "_fake_lean", None)
            if state is not None and right is not None:
                result = state.results.get((method, right, left) if reflected else (method, left, right))
                if result is not None:
                    if result.constant is not None:
                        return result.constant
                    made = new(result.__class__)
                    made.__dict__ = result.__dict__
                    return numbers[result.pytype](made)
        return through_node(self, node, other)

    def through_node(self: Any, node: Any, other: Any) -> Any:
        if (node.__class__ is not LeanNode and node.__class__ is not SymNode) or node.constant is not None:
            return original(self, other)
        if other.__class__ is int:
            operand = node.wrap_int(other)
        elif other.__class__ is symbolic and not reflected:
            operand = other.node
            if operand.__class__ is not LeanNode and operand.__class__ is not SymNode:
                return original(self, other)
        else:
            return original(self, other)
        result = getattr(operand, method)(node) if reflected else getattr(node, method)(operand)
        return result.constant if result.constant is not None else numbers[result.pytype](result)

    lean.__name__ = original.__name__
    return lean


class _Operators:
    """The one owner of the Python operators of ``torch.SymInt``: ``a + b`` without the detours of torch's own.

    They only do what torch's operators do, in fewer steps, so they may stay: the first adopted number keeps them until
    :meth:`uninstall`; acceleration holds them while it is on.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holders = 0
        self._kept = False
        self._saved: dict[str, tuple[Any, Any]] = {}

    def keep(self) -> None:
        """Put them in place for the rest of the process; does nothing if that was done."""
        if not self._kept:
            with self._lock:
                if not self._kept:
                    self._kept = True
                    self.acquire()

    def acquire(self) -> None:
        """Put them in place until as many calls of :meth:`release`."""
        with self._lock:
            self._holders += 1
            if self._holders > 1:
                return
            for reflected, table in ((False, _DUNDERS), (True, _REFLECTED)):
                for name, method in table.items():
                    original = vars(torch.SymInt)[name]
                    ours = _operator(method, original, reflected=reflected)
                    self._saved[name] = (original, ours)
                    setattr(torch.SymInt, name, ours)

    def release(self) -> None:
        """Undo one :meth:`acquire`; an operator that someone else has replaced since is left alone."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            for name, (original, ours) in self._saved.items():
                if vars(torch.SymInt).get(name) is ours:
                    setattr(torch.SymInt, name, original)
            self._saved.clear()

    def uninstall(self) -> None:
        """Undo :meth:`keep`: numbers stay lean, their Python operators are torch's again."""
        with self._lock:
            if self._kept:
                self._kept = False
                self.release()


OPERATORS = _Operators()
"""Process-wide, as ``torch.SymInt`` is."""


def patches() -> list[tuple[Any, str, Any]]:
    """Attributes of torch and what to put there (owner, name, value), while torch's own are in place."""
    return [
        *((SymNode, name, value) for name, value in _methods().items()),
        (ShapeEnv, "evaluate_sym_node", _evaluate(ShapeEnv.evaluate_sym_node)),
        (_t.FunctionalTensor, "__new__", staticmethod(_functional_new)),
    ]


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
