"""What a model returns, as plain data: how it is built from the outputs of its graph, and rebuilding it."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch

from fxpasses.plans.errors import NoPlan
from fxpasses.plans.objects.hidden_state import has_hidden_state

if TYPE_CHECKING:
    from fxpasses.plans.walks.walk import Walk

_VALUES: Mapping[str, Callable[[Any], Any]] = {
    "constant": lambda value: value,
    "dtype": lambda name: getattr(torch, name),
    "device": torch.device,
}
_BASES = {base.__name__: base for base in (collections.OrderedDict, dict, list, tuple, object)}


class Layout:
    """How to build a result.

    Attributes:
        content: nested lists for :func:`result_builder`: where a tensor is (``["output", 0]``, ``["argument", 0]``,
            ``["model", 0]``), a constant, an object that was met before, or a container or object with its
            base, class, items and attributes.
        classes: module and names of each class that is not built in.
        objects: those that the caller could tell from copies.
        tensors: those in the result, in the order of :func:`places_of_tensors`.

    Raises:
        NoPlan: the result holds something that cannot be rebuilt.
    """

    def __init__(
        self, result: Any, tensors: Mapping[int, list[Any]], objects: Mapping[int, list[Any]] | None = None
    ) -> None:
        """Args: the model's result, and by ``id`` where tensors are, and objects that are not rebuilt."""
        self.classes: list[tuple[str, ...]] = []
        self.has_number = False
        self._tensors, self._known, self._numbers = tensors, objects or {}, dict[int, int]()
        self.objects: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.content = self._described(result)

    def _described(self, value: Any) -> list[Any]:
        kind: Any = type(value)
        if isinstance(value, torch.Tensor):
            if id(value) not in self._tensors:
                raise NoPlan("a result that is no output of the graph")
            self.tensors.append(value)
            return self._tensors[id(value)]
        if id(value) in self._known:
            return self._known[id(value)]
        if value is None or kind in (bool, int, float, str):
            self.has_number |= kind in (int, float)
            return ["constant", value]
        if kind in (torch.dtype, torch.device):
            return [kind.__name__, str(value).removeprefix("torch.")]
        if id(value) in self._numbers:
            return ["same", self._numbers[id(value)]]
        self._numbers[id(value)] = len(self._numbers)
        if not isinstance(value, tuple):
            self.objects.append(value)
        base = next(base for base in _BASES.values() if isinstance(value, base))
        is_dict = isinstance(value, dict)
        if is_dict and not all(type(key) in (str, int) for key in value):
            raise NoPlan("a result with keys that are neither text nor numbers")
        if has_hidden_state(kind, base) and not hasattr(kind, "n_sequence_fields"):
            raise NoPlan(f"a result of class {kind.__qualname__}")
        items = (
            [[key, self._described(item)] for key, item in value.items()]
            if is_dict
            else []
            if base is object
            else list(map(self._described, value))
        )
        state = [[name, self._described(item)] for name, item in getattr(value, "__dict__", {}).items()]
        return [base.__name__, None if kind is base else self._class_name(kind), items, state]

    def _class_name(self, kind: type) -> list[str]:
        name = (kind.__module__, *kind.__qualname__.split("."))
        if _find_class(name) is not kind:
            raise NoPlan(f"a result of class {kind.__qualname__}")
        self.classes.append(name)
        return list(name)


def layout_of(
    result: Any, walk: Walk, arguments: Sequence[torch.Tensor], outputs: Sequence[Any], containers: Set[int]
) -> Layout:
    """How a result is built from graph outputs, arguments and tensors of the model.

    Args:
        result: what the model returned.
        walk: over the model.
        arguments: the tensors among the arguments.
        outputs: those of the graph.
        containers: among the arguments, by ``id``.

    Raises:
        NoPlan: it cannot be built from them, or is an object that others hold.
    """
    tensors = {id(t): ["model", i] for i, t in enumerate(walk.tensors)}
    tensors |= {id(t): ["argument", i] for i, t in enumerate(arguments)}
    layout = Layout(result, tensors | {id(t): ["output", i] for i, t in enumerate(outputs)})
    if not containers.isdisjoint(map(id, layout.objects)):
        raise NoPlan("a result that is an argument")
    if any(map(walk.has_met, layout.objects)):
        raise NoPlan("a result that is an object of the model")  # and not a copy of it
    return layout


class _AnyTensor(dict[int, list[Any]]):
    """Places of tensors, with one for every tensor."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: int) -> list[Any]:
        return ["output", 0]


def tensors_in(result: Any) -> list[torch.Tensor]:
    """The tensors in a model's result, in the order of :func:`places_of_tensors`."""
    return Layout(result, _AnyTensor()).tensors


def places_of_tensors(layout: Any) -> Iterator[list[Any]]:
    """Where the tensors of a result are, given the content of a :class:`Layout`."""
    kind, _, *rest = layout
    if kind in ("output", "argument", "model"):
        yield layout
    elif rest:
        items, attributes = rest
        keyed = items if issubclass(_BASES[kind], dict) else [(None, item) for item in items]
        for _, item in (*keyed, *attributes):
            yield from places_of_tensors(item)


def _find_class(name: Sequence[str]) -> Any:
    found: Any = sys.modules.get(name[0])
    for part in name[1:]:
        found = getattr(found, part, None)
    return found


Maker = Callable[[Sequence[Any], Sequence[torch.Tensor], list[Any]], Any]


def result_builder(
    layout: Any, model: Sequence[torch.Tensor]
) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    """A function that rebuilds the model's result from the graph's outputs and the tensors among the
    arguments.

    Args:
        layout: the content of a :class:`Layout`.
        model: the tensors of the model.
    """
    make = _make_maker(layout, model)
    return lambda outputs, arguments: make(outputs, arguments, [])


def _make_maker(layout: Any, model: Sequence[torch.Tensor]) -> Maker:
    kind, content, *rest = layout
    if kind == "output":
        return lambda outputs, arguments, made: outputs[content]
    if kind == "argument":
        return lambda outputs, arguments, made: arguments[content]
    if kind == "same":
        return lambda outputs, arguments, made: made[content]
    if kind == "model":
        return lambda outputs, arguments, made: model[content]  # not captured here, since it may be exchanged
    if kind in _VALUES:
        value = _VALUES[kind](content)
        return lambda outputs, arguments, made: value
    return _container_maker(_BASES[kind], content, rest[0], rest[1], model)


def _container_maker(base: Any, name: Any, items: Any, state: Any, model: Sequence[torch.Tensor]) -> Maker:
    """A function that makes a container or object as ``copy`` would, without calling the code of its class.

    Args:
        base: the built-in class that holds its items.
        name: of its class, if that is another one.
        items: their layouts, with their keys.
        state: the attributes, likewise.
        model: the tensors of the model.
    """
    kind = base if name is None else _find_class(name)
    keys = [item[0] for item in items] if issubclass(base, dict) else None
    makers = [_make_maker(item if keys is None else item[1], model) for item in items]
    attributes = [(key, _make_maker(item, model)) for key, item in state]
    new = kind if hasattr(kind, "n_sequence_fields") else lambda *given: base.__new__(kind, *given)

    def make(outputs: Sequence[Any], arguments: Sequence[torch.Tensor], made: list[Any]) -> Any:
        """Return the container. Args: the outputs of the graph, the arguments of the call, and what was made so
        far, to which it is added."""
        place = len(made)
        made.append(None)
        if base is tuple:
            value = new([make(outputs, arguments, made) for make in makers])
        else:
            value = made[place] = new()
        made[place] = value
        if base is list:
            list.extend(value, [make(outputs, arguments, made) for make in makers])
        elif keys is not None:
            for key, maker in zip(keys, makers, strict=True):
                base.__setitem__(value, key, maker(outputs, arguments, made))
        for key, maker in attributes:
            value.__dict__[key] = maker(outputs, arguments, made)
        return value

    return make
