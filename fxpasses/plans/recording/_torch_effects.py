"""Private names of Dynamo's record of what a frame does to objects older than its call."""

from __future__ import annotations

import collections
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch._dynamo.variables import ConstDictVariable, ListVariable, SymNodeVariable, TupleVariable
from torch._dynamo.variables.base import AttributeMutationExisting

from fake.seam.dynamo import InstructionTranslator, LazyVariableTracker, TensorVariable
from fake.seam.symbolic_shapes import GetItemSource
from fake.symbols.terms import text_of_source
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.inputs.exchanged import Entries
from fxpasses.plans.recording._torch_compiled import ConstantVariable, root_code


def changed_objects(*, dictionaries: bool) -> tuple[list[Any], str, list[str], list[tuple[Entries, Any]]]:
    """What the frame that Dynamo is tracing changes in objects older than the call.

    A frame may change the dictionary of its own ``**kwargs`` and the lists that Dynamo passes it: nothing
    else has them.

    Args:
        dictionaries: whether it may change other dictionaries too.

    Returns:
        The objects on which it sets attributes; an attribute that has another value afterwards, or ""; the
        names of those with the same value; and the places of tensors that it replaces: a dictionary and key,
        or a list and index.

    Raises:
        NoPlan: something else about an object is changed, or to a value that is not a constant.
    """
    output = InstructionTranslator.current_tx().output
    effects, code, found, differs, same = output.side_effects, root_code(), [], "", list[str]()
    exchanged = list[tuple[Any, Any]]()
    named = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    own = code.co_varnames[named] if code.co_flags & inspect.CO_VARKEYWORDS else None
    objects = {id(value): value for value in effects.keepalive}
    for number, item in effects.id_to_variable.items():
        if not type(item.mutation_type).__name__.endswith("Existing") or not effects.is_modified(item):
            continue
        if (isinstance(item, ConstDictVariable) and own == _local_name(item.source) is not None) or (
            _local_name(item.source, inside=True) in _NESTED_RESUME_LOCALS
        ):
            continue
        if dictionaries and isinstance(item, ConstDictVariable) and isinstance(objects.get(number), dict):
            found.append(objects[number])
            differs = "a dictionary"
            continue
        values = objects.get(number)
        if type(values) in _CONTAINERS and isinstance(item, (ConstDictVariable, ListVariable)):
            found.append(values)
            exchanged += [(values, key) for key in _replaced_tensor_keys(item, values)]
            differs = f"a {type(values).__name__}"
            continue
        attributes = effects.store_attr_mutations.get(item, {})
        if not attributes or not isinstance(item.mutation_type, AttributeMutationExisting):
            raise NoPlan("a frame that changes an object", type(item).__name__)
        value = getattr(item, "value", None)
        before = getattr(value, "__dict__", {})
        for name, after in attributes.items():
            # Leave alone what Dynamo has not computed yet: the graph is complete.
            if isinstance(after, (LazyVariableTracker, SymNodeVariable)):
                differs = f"{type(value).__qualname__}.{name}"
                continue
            if (tensors := _tensor_count(after)) is not None:
                differs = f"{type(value).__qualname__}.{name}"
                if _holds_tensors(before.get(name), tensors):
                    exchanged.append((before, name))
                continue
            constant = _constant_type_and_repr(after)
            if constant is None:
                raise NoPlan("a frame that changes an object", f"{type(value).__qualname__}.{name}")
            if name not in before or constant != [type(before[name]), repr(before[name])]:
                differs = f"{type(value).__qualname__}.{name}"
            else:
                same.append(name)
        found.append(value)
    return found, differs, same, exchanged


def _tensor_count(item: Any) -> int | None:
    """The number of tensors in what Dynamo tracks as a tuple of tensors, 0 for a tensor, else None."""
    if type(item) is TupleVariable and item.items:
        return len(item.items) if all(isinstance(part, TensorVariable) for part in item.items) else None
    return 0 if isinstance(item, TensorVariable) else None


def _holds_tensors(value: Any, number: int) -> bool:
    """Whether a value is a tuple of ``number`` tensors, or a tensor if that is 0."""
    if number == 0:
        return isinstance(value, torch.Tensor)
    return (
        type(value) is tuple
        and len(value) == number
        and all(isinstance(part, torch.Tensor) for part in value)
    )


def _replaced_tensor_keys(item: Any, values: Any) -> list[Any]:
    """Where in a dictionary or list the frame replaces tensors by other tensors.

    Args:
        item: what Dynamo knows of it.
        values: it, as it was before the call.
    """
    if isinstance(item, ConstDictVariable):

        def by_key(items: Mapping[Any, Any]) -> dict[Any, Any]:
            found = {getattr(key, "vt", key): value for key, value in items.items()}
            return {
                key.as_python_constant(): value for key, value in found.items() if key.is_python_constant()
            }

        before, after = by_key(item.original_items), by_key(item.items)
        replaced = [key for key in after if key in before and key in values and after[key] is not before[key]]
    else:
        after = dict(enumerate(item.items[: len(values)]))
        replaced = [
            i for i, value in after.items() if not _is_item(getattr(value, "source", None), item.source, i)
        ]
    return [
        key
        for key in replaced
        if (count := _tensor_count(after[key])) is not None and _holds_tensors(values[key], count)
    ]


def _is_item(source: Any, of: Any, position: int) -> bool:
    """Whether ``source`` is the item at ``position`` of the list with source ``of``."""
    return (
        isinstance(source, GetItemSource)
        and source.index == position
        and text_of_source(source.base) == text_of_source(of)
    )


_CONTAINERS = (dict, collections.OrderedDict, list)
_NESTED_RESUME_LOCALS = ("__nested_resume_fns", "__nested_frame_values")
"""Lists of functions and their locals that Dynamo makes at a graph break for the resume function."""


def _local_name(source: Any, *, inside: bool = False) -> str | None:
    """The local variable that a source is, or is in."""
    while inside and hasattr(source, "base"):
        source = source.base
    return getattr(source, "local_name", None)


def _constant_type_and_repr(item: Any) -> list[Any] | None:
    """The type and text of what Dynamo tracks as a constant, or None."""
    return [type(item.value), repr(item.value)] if isinstance(item, ConstantVariable) else None
