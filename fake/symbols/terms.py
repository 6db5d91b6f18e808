"""The user's terms: names of symbols based on the names of the inputs, such as ``x.size(0)``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy.printing.precedence import PRECEDENCE

from fake.seam import symbolic_shapes as _t

_LOCAL = re.compile(r"\b[LG]\['(\w+)'\]")
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['(\w+)'\]")
_UNKNOWN = re.compile(r"__meta_utils_unknown_tensor(\d+)")


def text_of_source(source: Any) -> str:
    """Return a source as a user would write it.

    >>> from torch._dynamo.source import LocalSource, TensorProperty, TensorPropertySource
    >>> text_of_source(TensorPropertySource(LocalSource("x"), TensorProperty.SIZE, 0))
    'x.size(0)'
    """
    if isinstance(source, _t.TensorPropertySource):
        index = "" if source.idx is None else str(source.idx)
        return f"{text_of_source(source.base)}.{source.prop.method_name()}({index})"
    text = _LOCAL.sub(r"\1", source.name)
    return _UNKNOWN.sub(r"input\1", _MEMBER.sub(r".\1", text))


def argument_names(inputs: Iterable[str]) -> dict[str, str]:
    """Return a distinct Python name for each input."""
    names: dict[str, str] = {}
    for text in inputs:
        name = re.sub(r"\W+", "_", text).strip("_") or "value"
        name = f"input_{name}" if name[0].isdigit() else name
        while name in names.values():
            name += "_"
        names[text] = name
    return names


@dataclass(frozen=True)
class Property:
    """One number that comes with the inputs: a size, a stride, an offset, or an integer itself.

    Attributes:
        source: how to reach it.
        expression: its current expression in the environment.
        kind: ``"size"``, ``"stride"``, ``"offset"`` or ``"number"``.
    """

    source: Any
    expression: sympy.Basic
    kind: str

    @property
    def text(self) -> str:
        return text_of_source(self.source)

    @property
    def root(self) -> str:
        """The input that the number belongs to."""
        return text_of_source(self.source.base if self.kind != "number" else self.source)

    @property
    def code(self) -> str:
        """The number as Python code on that input, which is written ``{root}``."""
        if self.kind == "number":
            return "{root}"
        index = "" if self.source.idx is None else str(self.source.idx)
        return f"{{root}}.{self.source.prop.method_name()}({index})"


def properties_of(shape_env: Any) -> list[Property]:
    """Return all numbers of all inputs of an environment, with their current expressions."""
    recorded = shape_env.__dict__.get("_fake_inputs", ())
    if shape_env.tracked_fakes:
        found = [
            p for source, value in _t.tracked_inputs(shape_env) for p in _input_properties(source, value)
        ]
    elif recorded:
        found = [
            p
            for source, sizes, strides, offset in recorded
            for p in _tensor_properties(source, sizes, strides, offset)
        ]
    else:
        found = []
    seen = {p.source.name for p in found}
    for symbol, sources in shape_env.var_to_sources.items():
        for source in sources:
            if source.name not in seen and not source.is_ephemeral():
                seen.add(source.name)
                found.append(Property(source, symbol, _kind(source)))
    # A number that a program reads in two places (a module's ``eps``, for example) may occur twice.
    once = {p.source.name: p for p in reversed(found)}
    return [Property(p.source, shape_env.simplify(p.expression), p.kind) for p in reversed(once.values())]


def _kind(source: Any) -> str:
    if not isinstance(source, _t.TensorPropertySource):
        return "number"
    return {_t.TensorProperty.SIZE: "size", _t.TensorProperty.STRIDE: "stride"}.get(source.prop, "offset")


def _input_properties(source: Any, value: Any) -> Iterator[Property]:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided and not value.is_nested:
            yield from _tensor_properties(source, value.size(), value.stride(), value.storage_offset())
        else:
            yield from _tensor_properties(source, value.size(), (), None)
    elif isinstance(value, (int, torch.SymInt, torch.SymFloat)):
        yield Property(source, _expression(value), "number")


def _tensor_properties(source: Any, sizes: Any, strides: Any, offset: Any) -> Iterator[Property]:
    for kind, numbers, prop in (
        ("size", sizes, _t.TensorProperty.SIZE),
        ("stride", strides, _t.TensorProperty.STRIDE),
    ):
        for index, number in enumerate(numbers):
            yield Property(_t.TensorPropertySource(source, prop, index), _expression(number), kind)
    if offset is not None:
        offset_source = _t.TensorPropertySource(source, _t.TensorProperty.STORAGE_OFFSET)
        yield Property(offset_source, _expression(offset), "offset")


def _expression(value: Any) -> sympy.Basic:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.expr
    return sympy.sympify(value)


_SUM = PRECEDENCE["Add"]


class Terms(_t.PythonPrinter):
    """Prints conditions with a text for each symbol.

    >>> s = sympy.Symbol("s0", integer=True)
    >>> Terms({s: "x.size(0)"}).doprint(sympy.Ge(s, 4))
    'x.size(0) >= 4'
    """

    def __init__(self, texts: Mapping[sympy.Basic, str]) -> None:
        super().__init__()
        self._texts = texts

    def _print_Symbol(self, symbol: sympy.Symbol) -> str:
        return self._texts.get(symbol, symbol.name)

    def _print_Relational(self, relation: Any) -> str:
        left, right = _move_negative_terms(relation.lhs, relation.rhs)
        return f"{self._side(left)} {relation.rel_op} {self._side(right)}"

    def _print_Add(self, total: sympy.Add, order: Any = None) -> str:
        """Print ``n - 1``, not ``(-1) + n``."""
        terms = sorted(total.args, key=lambda term: (term.could_extract_minus_sign(), term.is_number))
        if terms[0].could_extract_minus_sign():
            return super()._print_Add(total, order)
        text = self.parenthesize(terms[0], _SUM)
        for term in terms[1:]:
            minus = term.could_extract_minus_sign()
            text += f" {'-' if minus else '+'} {self.parenthesize(-term if minus else term, _SUM)}"
        return text

    def _print_ToFloat(self, number: Any) -> str:
        return f"float({self._print(number.args[0])})"

    def _print_TruncToInt(self, number: Any) -> str:
        return f"int({self._print(number.args[0])})"

    def _side(self, expression: sympy.Basic) -> str:
        """Print ``a % 2 == 0`` without parentheses."""
        text = self._print(expression)
        if isinstance(expression, (_t.Mod, _t.PythonMod, _t.FloorDiv)):
            while text.startswith("(") and _closing_parenthesis(text) == len(text) - 1:
                text = text[1:-1]
        return text

    def _print_Float(self, number: sympy.Float) -> str:
        return str(float(number))


def _move_negative_terms(left: sympy.Basic, right: sympy.Basic) -> tuple[sympy.Basic, sympy.Basic]:
    """Rewrite ``a - 2*n >= 0`` as ``a >= 2*n``."""
    if not (left.is_integer and right.is_integer) or not (left.is_Add or right.is_Add):
        return left, right
    moved = [t for t in sympy.Add.make_args(left) if t.could_extract_minus_sign()]
    returned = [t for t in sympy.Add.make_args(right) if t.could_extract_minus_sign()]
    if not moved and not returned:
        return left, right
    difference = sympy.Add(*moved) - sympy.Add(*returned)
    return left - difference, right - difference


def _closing_parenthesis(text: str) -> int:
    """Return the index of the parenthesis that closes the one at the start of a text."""
    depth = 0
    for index, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return index
    return -1
