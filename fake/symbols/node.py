"""Lean symbolic integers: torch's ``SymNode`` with repeated work memoized.

A traced model asks the same questions about the same sizes thousands of times. Per shape environment this
keeps

- one *canonical* node per expression, and the canonical result per ``(operation, node, node)``;
- one node per integer constant;
- on a canonical boolean, the answer that a guard was recorded for.

Results are returned as copies that point to the canonical node, never as the node itself: code that looks up
sizes by the identity of their nodes would otherwise tie together sizes that only happen to be equal. Nothing
is memoized while guards are suppressed, while the environment is frozen (its facts may be withdrawn), or
while ``make_fx`` records symbolic arithmetic; answers about unbacked symbols are never memoized.

:class:`LeanNode` is a subclass of torch's node, and :func:`adopt` turns a number's node into one, in any
environment. ``fake.acceleration`` puts the same methods on torch's own class, because torch creates the nodes
there (``lean_patches.py``).
"""

from __future__ import annotations

import copy
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch

from fake.seam import symbolic_shapes
from fake.seam.patches import LEDGER
from fake.seam.proxy_tensor import arithmetic_watchers, is_symbolic_arithmetic_recorded
from fake.symbols import operators

# Called by C++ without arguments, ten thousand times a step: a builtin method needs no Python frame.
_return_none: Callable[[], None] = [].clear


class Integers(dict[int, Any]):
    """The nodes of integer constants, created on first access."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, number: int) -> Any:
        node = self[number] = self._make(number)
        return node


class Replacements(dict[Any, Any]):
    """The replaced symbols of an environment; adding one invalidates the answers that
    depend on there being none."""

    def __init__(self, replacements: dict[Any, Any]) -> None:
        super().__init__(replacements)
        self.cached_not_int: list[dict[str, Any]] = []

    def __setitem__(self, symbol: Any, expression: Any) -> None:
        super().__setitem__(symbol, expression)
        while self.cached_not_int:
            self.cached_not_int.pop().pop("maybe_as_int", None)

    def __deepcopy__(self, memo: dict) -> dict[Any, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return (dict, (dict(self),))


class LeanState:
    """The memory of lean nodes for one shape environment (stored on the environment, with the same lifetime).

    Attributes:
        adopts: whether nodes that torch makes for the environment become lean when encountered.
        integers: the nodes of integer constants; None until one was made.
        booleans: the nodes of true and false.
        log: the recording that wants to know which memoized answers are used,
            or None (see ``fake.cache.evaluations``).
    """

    __slots__ = ("adopts", "booleans", "canonical", "integers", "log")

    def __init__(self) -> None:
        self.adopts = False
        self.canonical: dict[Any, Any] = {}
        self.integers: Integers | None = None
        self.booleans: dict[bool, Any] = {}
        self.log: Any = None

    def __deepcopy__(self, memo: dict) -> LeanState:
        return LeanState()

    def __reduce__(self) -> tuple[Any, ...]:
        return (LeanState, ())


def lean_state(shape_env: Any) -> LeanState:
    """Return the state of a shape environment, created at first use."""
    try:
        return shape_env._fake_lean
    except AttributeError:
        symbolic_shapes.HIDDEN_FILES.update_torch()
        state = shape_env._fake_lean = LeanState()
        shape_env.replacements = Replacements(shape_env.replacements)
        return state


def cache_not_int(node: Any) -> None:
    """Make a canonical node report that it is not a plain number, until a symbol is replaced."""
    replacements = node.shape_env.replacements
    if replacements.__class__ is Replacements:
        own = node.__dict__
        own["maybe_as_int"] = _return_none
        replacements.cached_not_int.append(own)


_BINARY = (
    "add", "sub", "mul", "mod", "gt", "lt", "le", "ge", "sym_min", "sym_max", "int_floordiv", "and_", "or_",
    "eq", "ne",
)  # fmt: skip
SymNode, ShapeEnv = symbolic_shapes.SymNode, symbolic_shapes.TorchShapeEnv


def _canonical_of(node: Any, state: LeanState) -> Any:
    """Return the canonical node of ``node``'s expression, and cache it on ``node``."""
    found = state.canonical.setdefault((node.expr, node.pytype, node.constant is None), node)
    node.__dict__["_canonical"] = found
    return found


def canonicalize(node: Any, state: LeanState) -> None:
    """Make a new node of a symbolic expression canonical, if there is no canonical one and nodes are lean."""
    if getattr(node, "_canonical", node) is None and _canonical_of(node, state) is node:
        cache_not_int(node)


def _copy(node: Any) -> Any:
    """Return a new node that shares all attributes with a canonical one;
    constants are returned as they are."""
    if node.constant is not None:
        return node
    made = object.__new__(node.__class__)
    # One dictionary for both: whatever is learned about an expression holds for all of its nodes.
    made.__dict__ = node.__dict__
    return made


def _cannot_memoize(shape_env: Any) -> bool:
    """Return whether nothing can be memoized for an environment: it validates all arithmetic itself, or does
    not allow access to its state, like the one in which shape specifications are written."""
    return (
        shape_env is None
        or shape_env._translation_validation_enabled
        or shape_env.__class__.__getattribute__ is not object.__getattribute__
    )


def _canonicalize_result(result: Any, operand: Any, state: LeanState) -> Any:
    """Make a result of torch's own arithmetic canonical, and as lean as the node that was asked."""
    if result.__class__ is SymNode:
        result.__class__ = operand.__class__
    if result._optimized_summation:
        # Marked for a faster way to add to it: an equal node without the mark must not replace it.
        result.__dict__["_canonical"] = result
        return result
    return _canonical_of(result, state)


def _binary(name: str, original: Callable) -> Callable:
    get_mode, proxies, modes_before, logs = arithmetic_watchers
    new, memory = object.__new__, f"_{name}_results"
    recall = operator.attrgetter(memory)

    def lean(self: Any, other: Any) -> Any:
        try:
            result = recall(self)[other._canonical]
        except (AttributeError, KeyError):
            return compute(self, other)
        if get_mode(proxies) is not None or modes_before[0] is not None or logs.GET_DTRACE_STRUCTURED:
            return original(self, other)
        own = result.__dict__
        if own["constant"] is not None or "_is_atom" in own:
            return result
        made = new(result.__class__)
        made.__dict__ = own
        return made

    def compute(self: Any, other: Any) -> Any:
        shape_env = self.shape_env
        if other.__class__ not in (SymNode, LeanNode):
            return original(self, other)
        if _cannot_memoize(shape_env) or is_symbolic_arithmetic_recorded():
            return original(self, other)
        state = lean_state(shape_env)
        left, right = _canonical_of(self, state), _canonical_of(other, state)
        known = left.__dict__.setdefault(memory, {})
        result = known.get(right)
        if result is None:
            for node in (left, right):
                if node._optimized_summation and not node.expr.is_Add:
                    node._optimized_summation = (
                        False  # replaced by one symbol or number; torch forgets the mark
                    )
            result = _canonicalize_result(original(left, right), self, state)
            if result.pytype is bool and result._expr.is_Atom:
                result.__dict__["_is_atom"] = True
            known[right] = result
            # The operators of SymInt look up the integer itself.
            if right.constant.__class__ is int:
                known[right.constant] = result
            if left.constant.__class__ is int:
                right.__dict__.setdefault(f"_{name}_reflected", {})[left.constant] = result
        if self.__dict__ is not left.__dict__:
            self.__dict__[memory] = known
        return _copy(result)

    lean.__name__ = name
    return lean


def _can_memoize_answer(node: Any) -> bool:
    """Return whether the answer for a node is now a guard of the environment,
    or follows from its guards, permanently."""
    shape_env = node.shape_env
    lean_state(shape_env)  # readers of memoized answers rely on it
    return (
        node._hint.__class__ in (bool, int, float)
        and not shape_env.frozen  # guards are not recorded, and facts may be withdrawn
        and not symbolic_shapes.guards_are_suppressed()
        and not symbolic_shapes.backed_size_oblivious()
        and node.expr.free_symbols <= shape_env.backed_var_to_val.keys()
    )


def _memoized_method(name: str, slot: str, original: Callable) -> Callable:
    """Return a method of a lean node that answers from memory once torch's has answered.

    Args:
        name: the name of the method.
        slot: the attribute that stores the answer.
        original: torch's method.
    """

    def lean(self: Any, file: str, line: int) -> Any:
        memory = (self._canonical or self).__dict__
        answer = memory.get(slot)
        if answer is None:
            answer = original(self, file, line)
            if _can_memoize_answer(self) and (slot != "_expected" or answer):
                memory[slot] = answer
        else:
            log = self.shape_env._fake_lean.log
            if log is not None:
                log.add_memoized(self.expr, answer)
        return answer

    lean.__name__ = name
    return lean


def _wrap_int(original: Callable) -> Callable:
    def wrap_int(self: Any, num: int) -> Any:
        env = self.shape_env
        if type(num) is not int or _cannot_memoize(env):
            return original(self, num)
        state = lean_state(env)
        if state.integers is None:
            first = self

            def make(number: int) -> Any:
                node = original(first, number)
                node.__class__ = first.__class__
                return node

            state.integers = Integers(make)
        if self._canonical is not None:
            self.__dict__["wrap_int"] = state.integers.__getitem__
        return state.integers[num]

    return wrap_int


def _wrap_bool(original: Callable) -> Callable:
    def wrap_bool(self: Any, num: bool) -> Any:
        env = self.shape_env
        if type(num) is not bool or _cannot_memoize(env):
            return original(self, num)
        known = lean_state(env).booleans
        node = known.get(num)
        if node is None:
            node = known[num] = original(self, num)
            node.__class__ = self.__class__
        return node

    return wrap_bool


def _maybe_as_int(original: Callable) -> Callable:
    version_of = symbolic_shapes.replacements_version

    def maybe_as_int(self: Any) -> int | None:
        own, shape_env = self.__dict__, self.shape_env
        if _cannot_memoize(shape_env):
            return original(self)
        version = version_of(shape_env)
        if own.get("_as_int_version") == version:
            answer = own["_as_int"]
        else:
            answer = original(self)
            if shape_env.frozen:
                return answer  # facts of a frozen environment may be withdrawn without a new version
            own["_as_int"], own["_as_int_version"] = answer, version
        if answer is None and self._canonical is not None and not shape_env.frozen:
            cache_not_int(self)
        return answer

    return maybe_as_int


def _expr(original: property) -> property:
    read = original.fget
    assert read is not None
    version_of = symbolic_shapes.replacements_version

    def expr(self: Any) -> Any:
        """The expression after replacements, updated only if one of its own symbols was replaced."""
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


def lean_methods() -> dict[str, Any]:
    """Return the lean form of every hot method of torch's node."""
    node = vars(SymNode)
    found: dict[str, Any] = {"_canonical": None}
    found |= {name: _binary(name, node[name]) for name in _BINARY if name in node}
    found["wrap_int"] = _wrap_int(node["wrap_int"])
    found["wrap_bool"] = _wrap_bool(node["wrap_bool"])
    found["maybe_as_int"] = _maybe_as_int(node["maybe_as_int"])
    found["expr"] = _expr(node["expr"])
    for name in ("guard_bool", "guard_or_false", "guard_or_true"):
        found[name] = _memoized_method(name, "_answer", node[name])
    found["expect_true"] = _memoized_method("expect_true", "_expected", node["expect_true"])
    return found


def _hint(original: property) -> property:
    read = original.fget
    assert read is not None

    def hint(self: Any) -> Any:
        """The hint, for code that decides by it without a guard;
        reads outside torch's own symbol code are logged."""
        state = getattr(self.shape_env, "_fake_lean", None)
        value = read(self)
        if state is None or state.log is None:
            return value
        if sys._getframe(1).f_code.co_filename not in _OWN_FILES:
            state.log.add_hint_read(self.expr, value)
        return value

    return property(hint)


_OWN_FILES = frozenset(
    function.__code__.co_filename for function in (SymNode.__init__, ShapeEnv.evaluate_sym_node)
)


def _returning_lean(original: Callable) -> Callable:
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
        # The attributes that C++ reads most, by names that Python's attribute cache lacks: found in one step.
        **{
            name: vars(SymNode)[name]
            for name in ("is_int", "is_bool", "is_float", "clone", "constant_int")
            if name in vars(SymNode)
        },
        **{
            name: _returning_lean(method)
            for name, method in vars(SymNode).items()
            if name in symbolic_shapes.magic_methods
        },
        **lean_methods(),
        "hint": _hint(vars(SymNode)["hint"]),
        "__doc__": "torch's node of a symbolic number with the repeated work remembered.",
        "__module__": __name__,
    },
)


def adopt(value: Any) -> Any:
    """Make a symbolic number lean, in place; leave anything else alone. Returns ``value``.

    >>> from torch.fx.experimental.symbolic_shapes import ShapeEnv
    >>> adopt(ShapeEnv().create_unbacked_symint()).node.__class__.__name__
    'LeanNode'
    """
    if isinstance(value, (torch.SymInt, torch.SymBool, torch.SymFloat)) and value.node.__class__ is SymNode:
        value.node.__class__ = LeanNode
    return value


OPERATORS = LEDGER.add(*operators.patches((SymNode, LeanNode)))
"""Patches of the operators of ``torch.SymInt``, on the ledger of patches."""
