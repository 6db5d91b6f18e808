"""Sizes and scalars that stay symbolic while C++ walks a node: arithmetic on them becomes steps.

C++ accepts any Python object as the node of a ``torch.SymInt`` or ``torch.SymFloat``. Ours knows its
value in this call (its hint), and reports queries that would bake the value into the graph.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_ARITHMETIC: dict[str, tuple[Callable[..., Any], str]] = {
    "add": (operator.add, "same"),
    "sub": (operator.sub, "same"),
    "mul": (operator.mul, "same"),
    "mod": (operator.mod, "same"),
    "floordiv": (operator.floordiv, "same"),
    "int_floordiv": (operator.floordiv, "same"),
    "truediv": (operator.truediv, "float"),
    "float_truediv": (operator.truediv, "float"),
    "int_truediv": (operator.truediv, "float"),
    "pow": (operator.pow, "same"),
    "pow_by_natural": (operator.pow, "same"),
    "float_pow": (operator.pow, "float"),
    "sym_min": (min, "same"),
    "sym_max": (max, "same"),
    "neg": (operator.neg, "same"),
    "pos": (operator.pos, "same"),
    "ceil": (math.ceil, "int"),
    "floor": (math.floor, "int"),
    "sym_float": (float, "float"),
    "eq": (operator.eq, "bool"),
    "ne": (operator.ne, "bool"),
    "lt": (operator.lt, "bool"),
    "le": (operator.le, "bool"),
    "gt": (operator.gt, "bool"),
    "ge": (operator.ge, "bool"),
    "and_": (operator.and_, "bool"),
    "sym_and": (operator.and_, "bool"),
    "or_": (operator.or_, "bool"),
    "sym_or": (operator.or_, "bool"),
    "sym_not": (operator.not_, "bool"),
}


@dataclass(eq=False, repr=False)
class SymbolicNode:
    """The node of one symbolic number.

    ``record(function, values)`` appends an arithmetic step and returns its value. ``specialized(what)`` is
    called when C++ requires a concrete number.
    """

    value: Any
    hint: float | int | bool
    kind: str
    _record: Callable[[Callable[..., Any], tuple[Any, ...]], Any]
    _on_specialize: Callable[[str], None]

    def is_int(self) -> bool:
        return self.kind == "int"

    def is_float(self) -> bool:
        return self.kind == "float"

    def is_bool(self) -> bool:
        return self.kind == "bool"

    def is_symbolic(self) -> bool:
        return True

    has_hint = is_symbolic

    def is_constant(self) -> bool:
        return False

    is_nested_int = is_constant

    def maybe_as_int(self) -> None:
        return None

    maybe_as_float = maybe_as_bool = maybe_as_int

    def clone(self) -> "SymbolicNode":
        return self

    def _new(self, value: Any, hint: Any, kind: str) -> "SymbolicNode":
        return SymbolicNode(value, hint, kind, self._record, self._on_specialize)

    def wrap_int(self, number: int) -> "SymbolicNode":
        return self._new(number, number, "int")

    def wrap_float(self, number: float) -> "SymbolicNode":
        return self._new(number, number, "float")

    def wrap_bool(self, flag: bool) -> "SymbolicNode":
        return self._new(flag, flag, "bool")

    def _specialize(self, what: str) -> Any:
        self._on_specialize(f"{what} of {self} was asked for")
        return self.hint

    def int_(self, *_: object) -> int:
        return int(self._specialize("the value"))

    def float_(self, *_: object) -> float:
        return float(self._specialize("the value"))

    def bool_(self, *_: object) -> bool:
        return bool(self._specialize("the truth"))

    # Called with the file and line of the query.
    guard_int, guard_float, guard_bool = int_, float_, bool_
    guard_size_oblivious = guard_or_false = guard_or_true = expect_true = expect_size = bool_

    def _describe(self) -> str:
        return f"symbolic {self.kind} {self.hint}"

    __str__ = _describe
    _graph_repr = _describe

    def __getattr__(self, name: str) -> Callable[..., "SymbolicNode"]:
        if name == "str":  # C++'s name for printing; a method of that name would hide the type in this class
            return self._describe  # type: ignore[return-value]
        try:
            function, result_kind = _ARITHMETIC[name]
        except KeyError:
            raise AttributeError(f"symbolic numbers have no operation {name!r}") from None

        def operate(*others: "SymbolicNode") -> "SymbolicNode":
            value = self._record(function, (self.value, *(other.value for other in others)))
            hint = function(self.hint, *(other.hint for other in others))
            kind = self.kind if result_kind == "same" else result_kind
            return self._new(value, hint, kind)

        return operate
