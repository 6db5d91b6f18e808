"""Symbolic expressions as plain data with numbered symbols.

``4*s0 + s7`` becomes ``("Add", ("Mul", 4, ("s", 0)), ("s", 1))`` if ``s0`` and ``s7`` are the first and
second symbol that a caller meets. Such data can be compared, hashed and pickled without sympy, so that
results for some symbols can be looked up for others. Arguments of commutative functions are sorted after the
numbering: sympy sorts by name.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy

from fake.seam.symbolic_shapes import int_oo, sympy_functions
from fake.tensors.tensor import Unkeyable

Encoded = Any
"""An integer, a symbol ``("s", number)``, a constant ``("true",)``, or ``(function, *arguments)``."""

_functions = sympy_functions

FUNCTIONS: dict[str, Callable[..., Any]] = {
    cls.__name__: cls
    for cls in (
        sympy.Add, sympy.Mul, sympy.Pow, sympy.Rational,
        sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge, sympy.And, sympy.Or, sympy.Not,
        _functions.FloorDiv, _functions.Mod, _functions.PythonMod, _functions.CleanDiv, _functions.ModularIndexing,
        _functions.Max, _functions.Min, _functions.CeilDiv, _functions.IntTrueDiv, _functions.FloatTrueDiv,
        _functions.TruncToInt, _functions.CeilToInt, _functions.FloorToInt, _functions.ToFloat,
        _functions.PowByNatural, _functions.Where,
    )
}  # fmt: skip
"""The functions allowed in an encoded expression; expressions with others are not encoded."""

_COMMUTATIVE = frozenset(("Add", "Mul", "Max", "Min", "And", "Or"))

_CONSTANTS: dict[Any, Encoded] = {
    sympy.true: ("true",),
    sympy.false: ("false",),
    int_oo: ("infinity", 1),
    -int_oo: ("infinity", -1),
}
_CONSTANT_VALUES = {encoded: value for value, encoded in _CONSTANTS.items()}


def encode(expr: Any, number_of: Callable[[Any], int]) -> Encoded:
    """Encode an expression as plain data.

    Args:
        number_of: returns the number of a symbol.

    Raises:
        Unkeyable: it contains a function or a constant that has no encoding.

    >>> import sympy
    >>> encode(sympy.Symbol("a", integer=True) * 2 + 1, lambda symbol: 0)
    ('Add', ('Mul', ('s', 0), 2), 1)
    """
    if expr.__class__ is int:
        return expr
    if expr.is_Symbol:
        return ("s", number_of(expr))
    if expr.is_Integer:
        return int(expr)
    constant = _CONSTANTS.get(expr)
    if constant is not None:
        return constant
    kind = type(expr)
    name = kind.__name__
    if expr.is_Rational:
        return ("Rational", int(expr.p), int(expr.q))
    if FUNCTIONS.get(name) is not kind:
        raise Unkeyable(f"{name} in a symbolic size")
    arguments = [encode(argument, number_of) for argument in expr.args]
    if name in _COMMUTATIVE:
        arguments.sort(key=repr)
    return (name, *arguments)


def decode(encoded: Encoded, symbols: Sequence[Any]) -> Any:
    """Return the sympy expression, with ``symbols[i]`` for symbol number *i*."""
    if encoded.__class__ is int:
        return sympy.Integer(encoded)
    name = encoded[0]
    if name == "s":
        return symbols[encoded[1]]
    if name in ("true", "false", "infinity"):
        return _CONSTANT_VALUES[encoded]
    arguments = [decode(argument, symbols) for argument in encoded[1:]]
    if (
        name == "Equality"
        and arguments[0].is_Symbol
        and arguments[1].is_Symbol
        and arguments[0] != arguments[1]
    ):
        return sympy.Eq(*arguments, evaluate=False)  # evaluating only finds that nothing is known
    return FUNCTIONS[name](*arguments)


def _compare(relation: Callable[[Any, Any], bool]) -> Callable[[list[Any]], Any]:
    return lambda values: relation(*values)


_ARITHMETIC: dict[str, Callable[[list[Any]], Any]] = {
    "Add": sum,
    "Mul": math.prod,
    "Max": max,
    "Min": min,
    "And": all,
    "Or": any,
    "Not": lambda values: not values[0],
    "FloorDiv": lambda values: values[0] // values[1],
    "CleanDiv": lambda values: values[0] // values[1],
    "Mod": lambda values: values[0] % values[1],
    "PythonMod": lambda values: values[0] % values[1],
    "Equality": _compare(operator.eq),
    "Unequality": _compare(operator.ne),
    "StrictLessThan": _compare(operator.lt),
    "LessThan": _compare(operator.le),
    "StrictGreaterThan": _compare(operator.gt),
    "GreaterThan": _compare(operator.ge),
}


def evaluate(encoded: Encoded, values: Sequence[int]) -> Any:
    """Evaluate an expression at given values of its symbols, in plain integers if these suffice.

    Raises:
        ArithmeticError: it has no value there (a division by zero).

    >>> evaluate(("FloorDiv", ("s", 0), 4), [18])
    4
    """
    if encoded.__class__ is int:
        return encoded
    name = encoded[0]
    if name == "s":
        return values[encoded[1]]
    if name == "true" or name == "false":
        return name == "true"
    rule = _ARITHMETIC.get(name)
    if rule is not None:
        return rule([evaluate(argument, values) for argument in encoded[1:]])
    value = decode(encoded, [sympy.Integer(number) for number in values])
    if value.is_Integer:
        return int(value)
    return bool(value) if value.is_Boolean else value
