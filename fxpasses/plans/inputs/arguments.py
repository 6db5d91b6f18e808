"""The inputs of a call as values that compare: its arguments and the options of the compilation."""

from __future__ import annotations

import collections
import copyreg
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from fxpasses.plans import _torch
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.objects import _torch_notes
from fxpasses.plans.objects.hidden_state import has_hidden_state
from fxpasses.plans.objects.kinds import HEAP_TYPE
from fxpasses.plans.objects.references import can_be_weak, reference_to
from fxpasses.plans.tensors.same_tensors import has_inline_metadata, memory_library
from fxpasses.plans.tensors.tensor_facts import TENSOR_FACTS, is_leaf, tensor_facts


def describe_arguments(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], part_of_model: Callable[[torch.Tensor], int | None]
) -> tuple[Any, list[torch.Tensor], list[Any]]:
    """Describe the arguments, and collect the tensors among them and the objects that have to be walked.

    Args:
        args: the positional arguments.
        kwargs: the keyword arguments.
        part_of_model: maps a tensor to its number in the model, or None.

    Returns:
        Nested tuples that are equal for calls which the same plan may serve if the objects have the same
        content, the tensors, and these objects.

    Raises:
        NoPlan: an argument is of a kind that plans do not support.
    """
    seen = _Describer(part_of_model)
    described = tuple(map(seen.describe, args)), tuple((k, seen.describe(v)) for k, v in kwargs.items())
    return described, seen.tensors, seen.objects


def is_record(value: Any) -> bool:
    """Whether an object is described by its fields: an instance of a data class, usually new in each call.

    An object that may count or collect something is not a record, unless it is frozen. It may be the same
    object in each call, so what the code names of it counts.

    Args:
        value: the object.
    """
    left, met = [value], set[int]()
    while left:
        item = left.pop()
        if type(item) is tuple:
            left += item
        elif _is_data_class(kind := type(item)):  # type: ignore[arg-type]
            if not kind.__dataclass_params__.frozen and id(item) not in met:
                left += vars(item).values()
            met.add(id(item))
        elif not (isinstance(item, torch.Tensor) or item is None or kind in _NON_NUMERIC):
            return False
    return id(value) in met


@functools.cache
def _is_data_class(kind: Any) -> bool:
    base = next(base for base in kind.__mro__ if not base.__flags__ & HEAP_TYPE)
    slots = copyreg._slotnames(kind)  # type: ignore[attr-defined]
    why_not_plain = base is object and not issubclass(kind, torch.nn.Module) and not slots
    return why_not_plain and not has_hidden_state(kind, object) and dataclasses.is_dataclass(kind)


def containers_of(value: Any) -> set[int]:
    """The ``id`` of each list, dictionary and object of a data class in a function's arguments."""
    found, left = set[int](), [value]
    while left:
        item = left.pop()
        is_list = isinstance(item, (list, tuple, dict))
        if id(item) in found or not (is_list or is_record(item)):
            continue
        found.add(id(item))
        if is_list:
            left += dict.values(item) if isinstance(item, dict) else item
        left += getattr(item, "__dict__", {}).values()
    return found


class _Describer:
    """What a description has met so far."""

    def __init__(self, part_of_model: Callable[[torch.Tensor], int | None]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.objects: list[Any] = []
        self._part_of_model = part_of_model
        self._numbers: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        self._mutable_numbers: dict[int, int] = {}

    def describe(self, value: Any) -> Any:
        """Describe one value."""
        kind: Any = type(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if value is None or kind in _SCALARS:
            return kind.__name__, repr(value)
        if kind is tuple or kind is torch.Size:
            return kind.__name__, *map(self.describe, value)
        if id(value) in self._mutable_numbers:  # a change through one place is visible in the other
            return "again", self._mutable_numbers[id(value)]
        self._mutable_numbers[id(value)] = len(self._mutable_numbers)
        if kind is list:
            return kind.__name__, *map(self.describe, value)
        if kind is dict and all(type(key) in (str, int) for key in value):
            return "dict", *((repr(key), self.describe(item)) for key, item in value.items())
        base: Any = next((base for base in _CONTAINERS if isinstance(value, base)), None)
        if base is None and is_record(value):
            return (
                "record",
                self._object(kind),
                *((n, self.describe(item)) for n, item in vars(value).items()),
            )
        if base is None or has_hidden_state(kind, base) or copyreg._slotnames(kind):  # type: ignore[attr-defined]
            return self._object(value)
        is_dict = issubclass(base, dict)
        if is_dict and not all(type(key) is str for key in base.keys(value)):
            return self._object(value)
        items = base.items(value) if is_dict else enumerate(base.__iter__(value))
        state = getattr(value, "__dict__", {}).items()
        parts = [tuple((repr(key), self.describe(item)) for key, item in of) for of in (items, state)]
        return base.__name__, self._object(kind), *parts

    def _object(self, value: Any) -> Any:
        number = next((i for i, known in enumerate(self.objects) if known is value), len(self.objects))
        self.objects[number:] = self.objects[number:] or [value]
        return "object", number, type(value).__qualname__

    def _tensor(self, value: torch.Tensor) -> Any:
        if id(value) in self._numbers:
            return "same", self._numbers[id(value)]
        self._numbers[id(value)] = len(self.tensors)
        self.tensors.append(value)
        facts = tensor_facts(value)
        pointer = value.untyped_storage().data_ptr() if value.numel() else -1 - len(self._storages)
        place = self._storages.setdefault(pointer, len(self._storages))
        marks = _torch_notes.dynamic_marks(value)
        if marks is None:
            raise NoPlan("an argument with attributes of its own")
        return "tensor", place, self._part_of_model(value), *facts, marks


class SameArguments:
    """A fast check that other arguments have the same description as these.

    Args:
        args: the positional arguments.
        kwargs: the keyword arguments.
        tensors: those among them, as :func:`describe_arguments` returns them.
        objects: likewise.
        model: the tensors of the model.
        open: the places of numbers that may differ, as in :mod:`~fxpasses.plans.inputs.given_numbers`.
        grow: which of the tensors may have other sizes, strides and offsets.
    """

    @staticmethod
    def can_compare(
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
        objects: Sequence[Any],
    ) -> bool:
        """Whether there is a fast check: flat arguments, and distinct tensors with memory of their own
        outside the model.

        Args:
            args: positional arguments of the model.
            kwargs: keyword arguments.
            tensors: those among them.
            objects: likewise.
        """
        values = (*args, *kwargs.values())
        known = [*map(id, objects)]
        return (
            sum(isinstance(value, torch.Tensor) for value in values) == len(tensors)
            and all(
                value is None
                or type(value) in _SCALARS
                or isinstance(value, torch.Tensor)
                or id(value) in known
                or (type(value) in (list, tuple, dict) and not value)
                for value in values
            )
            and all(tensor.numel() for tensor in tensors)
            and len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
        )

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
        objects: Sequence[Any],
        model: Sequence[torch.Tensor],
        open: Collection[str] = (),
        grow: Collection[int] = (),
    ) -> None:
        self._count, self._names, self._model = len(args), tuple(kwargs), frozenset(map(id, model))
        values = [*args, *kwargs.values()]
        self._tensors = [i for i, value in enumerate(values) if isinstance(value, torch.Tensor)]
        known = [*map(id, objects)]
        self._objects = [(i, reference_to(value)) for i, value in enumerate(values) if id(value) in known]
        numbers = {int(place) if place.isdigit() else len(args) + self._names.index(place) for place in open}
        self._non_tensors = [
            (i, type(value), None if i in numbers else repr(value))
            for i, value in enumerate(values)
            if i not in self._tensors and id(value) not in known
        ]
        self._facts = [(None if i in grow else t.storage_offset(), is_leaf(t)) for i, t in enumerate(tensors)]
        self._guards = _torch.tensor_guards(tensors, grow) if tensors else None
        library, self._native_check = memory_library(), None
        no_containers = all(
            kind not in (list, dict) for _, kind, _ in self._non_tensors
        )  # otherwise the same one may be filled later
        if library is not None and no_containers and not grow and all(map(has_inline_metadata, tensors)):
            kinds = tuple(
                "number"
                if i in numbers
                else "tensor"
                if isinstance(v, torch.Tensor)
                else "object"
                if id(v) in known and can_be_weak(v)
                else ""
                for i, v in enumerate(values)
            )
            given = args, dict(kwargs), kinds, tuple(model)
            self._native_check = library.Arguments(*given, _torch.TENSOR_LAYOUT).tensors

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor] | None:
        """The tensors among the arguments, or None if the description may differ."""
        if self._native_check is not None and (found := self._native_check(args, kwargs)) is not None:
            return found  # type: ignore[no-any-return]
        if len(args) != self._count or tuple(kwargs) != self._names:
            return None
        values = (*args, *kwargs.values()) if kwargs else args
        for i, kind, text in self._non_tensors:
            if type(values[i]) is not kind or (text is not None and repr(values[i]) != text):
                return None
        for i, known in self._objects:
            if values[i] is not known():
                return None
        tensors = [values[i] for i in self._tensors]
        if self._guards is None:
            return tensors
        if not self._guards.check(*tensors):
            return None
        for tensor, (offset, leaf) in zip(tensors, self._facts, strict=True):
            if offset is not None and tensor.storage_offset() != offset:
                return None
            if is_leaf(tensor) is not leaf:
                return None
            if tensor.__dict__ and tensor.__dict__.keys() != {_torch_notes.PROPAGATED}:
                return None
            if id(tensor) in self._model:
                return None
        if len(tensors) > 1 and len({t.untyped_storage().data_ptr() for t in tensors}) != len(tensors):
            return None
        return tensors


ARGUMENT_FACTS = ("memory", "tensor of the model", *TENSOR_FACTS, "what is marked of its sizes")
"""The facts in the description of a tensor, after the word "tensor"."""
_CONTAINERS = (collections.OrderedDict, dict, list, tuple)
_NON_NUMERIC = (bool, str, bytes, torch.dtype, torch.device)
_SCALARS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def without_sizes(described: Any) -> Any:
    """A description of arguments with only the number of dimensions of tensors.

    Marks that sizes are fixed or dynamic are dropped too: a graph for all sizes is right for each.
    """
    if not isinstance(described, tuple):
        return described
    if described[:1] == ("tensor",) and len(described) == 1 + len(ARGUMENT_FACTS) and described[2] is None:
        shape = ARGUMENT_FACTS.index("sizes") + 1
        return (*described[:shape], len(described[shape]), None, *described[shape + 2 : -1], None)
    return tuple(map(without_sizes, described))


def without_numbers(described: Any) -> Any:
    """A description of arguments without the values of numbers among them."""
    if not isinstance(described, tuple) or described[:1] == ("tensor",):
        return described
    if len(described) == 2 and described[0] in ("int", "float"):
        return described[:1]
    return tuple(map(without_numbers, described))


def argument_difference(saved: Any, now: Any) -> tuple[str, str, str]:
    """The first difference of two descriptions of arguments, as JSON: which argument, old and new value."""
    (args, kwargs), (args_now, kwargs_now) = saved, now
    if len(args) != len(args_now):
        return "number of positional arguments", str(len(args)), str(len(args_now))
    if [name for name, _ in kwargs] != [name for name, _ in kwargs_now]:
        return (
            "names of arguments",
            repr([name for name, _ in kwargs]),
            repr([name for name, _ in kwargs_now]),
        )
    names = [f"argument {i}" for i in range(len(args))] + [f"argument {name}" for name, _ in kwargs]
    values = [*args, *(value for _, value in kwargs)], [*args_now, *(value for _, value in kwargs_now)]
    for name, was, value in zip(names, *values, strict=True):
        if was != value:
            return _difference(name, was, value)
    return "arguments", repr(saved), repr(now)


def _difference(name: str, was: Any, now: Any) -> tuple[str, str, str]:
    if was[0] == now[0] == "tensor":
        for fact, a, b in zip(ARGUMENT_FACTS, was[1:], now[1:], strict=True):
            if a != b:
                return f"{fact} of {name}", _text(a), _text(b)
    if was[0] == now[0] == "record" and was[1] == now[1]:
        for (field, a), (field_now, b) in zip(was[2:], now[2:], strict=False):
            if a != b and field == field_now:
                return _difference(f"{name}.{field}", a, b)
    if was[0] == now[0] and was[0] in ("tuple", "list", "dict") and len(was) == len(now):
        for i, (a, b) in enumerate(zip(was[1:], now[1:], strict=True)):
            if a != b and was[0] != "dict":
                return _difference(f"{name}[{i}]", a, b)
            if a != b and a[0] == b[0]:
                return _difference(f"{name}[{a[0]}]", a[1], b[1])
    return name, _brief(was), _brief(now)


def _brief(value: Any) -> str:
    return "a tensor" if value[0] == "tensor" else f"{value[0]} {_text(value[1:])}"


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(map(_text, value)) + ")"
    return str(value)


def describe_options(options: Mapping[str, Any]) -> dict[str, str]:
    """The options, with pass objects described by what they do.

    Raises:
        NoPlan: some of them rule a plan out.
    """
    found = {
        name: repr(value) for name, value in options.items() if name not in ("passes", "report", "cache")
    }
    if options.get("check") == "values" or options.get("report"):
        raise NoPlan("graphs that are checked or reported while they are compiled")
    passes = options.get("passes")
    if options.get("compiled_autograd"):
        raise NoPlan("backward passes that are captured")
    if passes == "tuned":
        found["passes"] = "tuned"
    elif not isinstance(passes, str | Sequence | None) and hasattr(passes, "told"):
        found["passes"] = passes.told()  # chosen by measuring, and how
    elif passes is not None and not isinstance(passes, str | Sequence):
        raise NoPlan("options that cannot be described")
    elif passes is not None:
        found["passes"] = repr([_describe_pass(p) for p in ([passes] if isinstance(passes, str) else passes)])
    if " at 0x" in repr(found):
        raise NoPlan("options that cannot be described")
    return found


def _describe_pass(item: Any) -> str:
    if isinstance(item, str):
        if "::" in item:
            raise NoPlan("passes of other libraries")
        return repr(item)
    from fxpasses.pass_manager.identity import identify  # already imported by whoever has a pass

    digest = identify(item).digest
    if digest is None:
        raise NoPlan("a pass that cannot be identified")
    return digest


def sources_of(
    inputs: Sequence[Any],
    model: Sequence[torch.Tensor],
    arguments: Sequence[torch.Tensor],
    numbers: Sequence[Sequence[Any] | None],
    gradients: Mapping[int, torch.Tensor],
    groups: Sequence[Any] = (),
) -> list[list[Any]]:
    """Where each input of a graph comes from.

    That is a tensor of the model, an argument, a gradient of the model, or the value of a float; for a size,
    also which size of which of these tensors.

    Args:
        inputs: of the graph.
        model: the tensors of the model.
        arguments: those among the arguments.
        numbers: for each input that is a number, which number of which input or object it is.
        gradients: by the number of the tensor of the model that has it.
        groups: the process groups and meshes that the model holds.

    Raises:
        NoPlan: an input comes from elsewhere.
    """
    places: dict[int, list[Any]] = {id(t): ["model", i] for i, t in enumerate(model)}
    places |= {id(t): ["argument", i] for i, t in enumerate(arguments) if id(t) not in places}
    places |= {id(t): ["gradient", i] for i, t in gradients.items() if id(t) not in places}
    places |= {id(group): ["group", i] for i, group in enumerate(groups)}
    found: list[list[Any]] = []
    numbers = numbers if len(numbers) == len(inputs) else [None] * len(inputs)
    for value, number in zip(inputs, numbers, strict=True):
        if not isinstance(value, (torch.Tensor, int)) and id(value) not in places:
            raise NoPlan("an input that is no tensor")
        if number == ["constant"] and isinstance(value, torch.Tensor) and value.dtype is torch.float64:
            found.append(["constant", value.item()])
            continue
        if number is not None and number[0] in ("option", "attribute", "number"):
            found.append(list(number))
            continue
        if isinstance(value, torch.Tensor) and id(value) not in places:
            raise NoPlan("an input that is neither an argument nor part of the model")
        found.append([] if isinstance(value, int) else places[id(value)])
    for i in range(len(inputs)):
        if found[i]:
            continue
        number = numbers[i]
        if number is None:
            raise NoPlan("a symbolic number that is no size of an input")
        method, of, dim = number
        if found[of][0] not in ("argument", "model"):
            raise NoPlan("a symbolic size of a gradient")
        found[i] = ["size", *found[of], method, dim]
    return found
