"""Objects of which a plan depends only on the attributes that traced code names. What a trainer counts and
collects differs in each call.

A walk leaves these objects open until it is told the names. If code may read an attribute whose name is not
written in it, all attributes are walked.
"""

from __future__ import annotations

import dis
import functools
import re
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fxpasses.plans import _torch
from fxpasses.plans.objects.code import attribute_names, codes_inside, global_names, strings_of
from fxpasses.plans.objects.kinds import HEAP_TYPE
from fxpasses.plans.objects.origin import is_covered_by_version, is_stdlib_code

_WITHOUT_ATTRIBUTES = ("abc", "typing", "typing_extensions")
"""Modules whose classes set no instance attributes except ``__orig_class__``, which code reads by name."""
_NAMED_BY_ARGUMENT = frozenset({"getattr", "hasattr", "setattr", "delattr"})
_BY_ANY_NAME = frozenset({
    "__dict__", "__getattribute__", "__setattr__", "__delattr__", "__reduce__", "__reduce_ex__", "__getstate__", "__dir__",
    "attrgetter", "getattr_static", "getmembers", "deepcopy",
})  # fmt: skip
_BY_ANY_NAME_IF_GLOBAL = frozenset({"vars", "dir", "copy"})
_IGNORED_OPCODES = ("CACHE", "EXTENDED_ARG", "PUSH_NULL", "NOP")
_MAX_BITS = 62
"""Bits of the integers that torch computes with, leaving room for a sum."""
_IDENTIFIER = re.compile(r"[^\W\d]\w*")


def current_integer(owner: Any, name: str) -> int | None:
    """The value of attribute ``name`` of ``owner``, if a graph may take it as an input."""
    value = vars(owner).get(name)
    return value if type(value) is int and value.bit_length() < _MAX_BITS else None


@functools.cache
def has_named_attributes(kind: type) -> bool:
    """Whether objects of a class are left open: those of plain user classes, of which torch's code knows
    nothing.

    A class that compares by content is excluded, since its attributes may be read where no code says so.
    """
    bases = [
        base
        for base in kind.__mro__
        if base.__flags__ & HEAP_TYPE and base.__module__ not in _WITHOUT_ATTRIBUTES
    ]
    return (
        bool(bases)
        and next(base for base in kind.__mro__ if not base.__flags__ & HEAP_TYPE) is object
        and not any(_torch.is_trusted(base) or issubclass(base, torch.nn.Module) for base in bases)
        and kind.__hash__ in (object.__hash__, None)
    )


@dataclass(frozen=True)
class Names:
    """Names of attributes.

    Attributes:
        named: those that traced code may read. Whether each exists matters.
        relied_on: those whose values Dynamo relies on and checks before each call.
        numbers: the integers that are graph inputs: the number of the object in the order of a walk, and the
            name.
        grow: the tensors whose sizes are graph inputs: their numbers in the order of a walk.
        everything: whether all attributes count.
    """

    named: frozenset[str]
    relied_on: frozenset[str]
    numbers: frozenset[tuple[int, str]] = frozenset()
    grow: frozenset[int] = frozenset()
    everything: bool = False

    def is_read(self, name: str, value: object) -> bool:
        """Whether an attribute's value counts.

        If traced code names it but Dynamo does not guard on it, data does not count, since the code behind a
        graph break has not been traced yet. Callables do.

        Args:
            name: its name.
            value: its value.
        """
        return (
            self.everything
            or name in self.relied_on
            or (name in self.named and (isinstance(value, _LASTING) or callable(value)))
        )

    def as_data(self) -> list[Any]:
        """The names as JSON."""
        parts: tuple[frozenset[Any], ...] = self.named, self.relied_on, self.numbers, self.grow
        return [*map(sorted, parts), self.everything]


EVERYTHING = Names(frozenset(), frozenset(), everything=True)
"""Stands for any name."""
_LASTING = (torch.nn.Module, type)


def names_from(data: list[Any]) -> Names:
    """The inverse of :meth:`Names.as_data`."""
    named, relied_on, numbers, grow, everything = data
    numbers = frozenset((owner, name) for owner, name in numbers)
    return Names(frozenset(named), frozenset(relied_on), numbers, frozenset(grow), everything)


def names_read(
    codes: Iterable[types.CodeType],
    guarded: Iterable[str],
    untraced: Iterable[types.CodeType] = (),
    extra: Iterable[str] = (),
) -> Names:
    """The names of attributes that code reads. Any name, if it computes one.

    Args:
        codes: what was traced, in part or whole. Torch's code knows nothing of the user's classes.
        guarded: the places that Dynamo relies on, as it writes them.
        untraced: those of the codes that ran during the trace, on which Dynamo does not guard.
        extra: names that something else reads.
    """
    relied_on = {name for place in guarded for name in _IDENTIFIER.findall(place)}
    if any(place.endswith(".__dict__") for place in guarded):
        return EVERYTHING
    found = {*extra}
    for code in codes:
        if is_covered_by_version(code) and not is_stdlib_code(code):
            continue
        if _may_read_any_attribute(code):
            return EVERYTHING
        found.update(_attribute_names_in(code))
    relied_on.update(name for code in untraced for name in _attribute_names_in(code))
    return Names(frozenset(found | relied_on), frozenset(relied_on))


def _attribute_names_in(code: types.CodeType) -> Iterator[str]:
    yield from attribute_names(code)
    yield from (name for text in strings_of(code) for name in _IDENTIFIER.findall(text))


@functools.cache
def _may_read_any_attribute(code: types.CodeType) -> bool:
    named = set(attribute_names(code))
    if (
        named & _BY_ANY_NAME
        or set(global_names(code)) & _BY_ANY_NAME_IF_GLOBAL
        or strings_of(code) & _BY_ANY_NAME
    ):
        return True
    return any(_computes_attribute_name(inner) for inner in codes_inside(code))


def _computes_attribute_name(code: types.CodeType) -> bool:
    """Whether code reads attributes by a computed name, or destructures objects with a class pattern."""
    listed = [i for i in dis.get_instructions(code) if i.opname not in _IGNORED_OPCODES]
    for place, instruction in enumerate(listed):
        if instruction.opname == "MATCH_CLASS":
            return True
        if instruction.argval not in _NAMED_BY_ARGUMENT or instruction.opname == "LOAD_CONST":
            continue
        behind = place + 2  # the object and its attributes
        while behind < len(listed) and listed[behind].opname == "LOAD_ATTR":
            behind += 1
        if instruction.opname not in ("LOAD_GLOBAL", "LOAD_NAME") or behind >= len(listed):
            return True
        if not listed[place + 1].opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL")):
            return True
        if listed[behind].opname != "LOAD_CONST" or not isinstance(listed[behind].argval, str):
            return True
    return False
