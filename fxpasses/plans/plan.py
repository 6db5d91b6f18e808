"""A loaded plan: its checks before each call, and the call itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch

from fxpasses.plans._torch_frames import never_traced
from fxpasses.plans._torch_optimizers import option_now
from fxpasses.plans.exchanged import Exchanged, Place, PlaceKey, are_alone, key_of
from fxpasses.plans.given_numbers import GivenNumbers
from fxpasses.plans.gradients import Gradients, have_none
from fxpasses.plans.held_views import HeldViews
from fxpasses.plans.named_attributes import number_now
from fxpasses.plans.plan_files import SUFFIX
from fxpasses.plans.results import builder
from fxpasses.plans.runtime import callable_of
from fxpasses.plans.same_tensors import SamePlaces, SameTensors
from fxpasses.plans.shards import flat
from fxpasses.plans.walk import Walk


class Checked:
    """A walk whose findings can be rechecked quickly, except for exchanged tensors."""

    def __init__(self, walk: Walk, tensors: Sequence[torch.Tensor]) -> None:
        self._watch, self._tensors = walk.watch, SameTensors(tensors)

    def holds(self) -> bool:
        """Whether nothing has changed."""
        return self._watch.holds() and self._tensors.hold()

    def _release(self, places: Mapping[int, Place], tensors: Sequence[torch.Tensor]) -> None:
        """Stop watching the entries of some places. ``tensors`` are those to check from now on."""
        for place in places.values():
            self._watch.release(place.values, place.key)
        self._tensors = SameTensors(tensors)

    def let_hold(self, views: HeldViews) -> None:
        """Let ``views`` cache views of the tensors until one of the tensors may have moved."""
        self._tensors.let_hold(views)


class Plan(Checked):
    """A loaded plan, bound to the model that it was checked for.

    ``walk`` continued from the model's walk over what the plan reads.

    Attributes:
        file: the file of the plan.
        frame: runs the whole frame, if the frame does more than call its graph.
        alone: runs the graph, if gradients are on and the plan has no backward graph.
        exchanges: by number, the places of the model's tensors that each call may replace.
        exchanged_there: all such places.
        asks_of_model: whether it depends on numbers or sizes that objects of the model hold. While the plan
            holds, it can be asked whether it accepts them.
        asks_bases: whether it depends on sizes of the bases of arguments that are views.
        is_tuned: whether it is a program that was chosen by measuring. If it fails, the default may still
            work.
        changes: whether it mutates tensors that are passed to it or held by the model.
    """

    def __init__(
        self,
        content: Mapping[str, Any],
        names: Mapping[str, Any],
        walk: Walk,
        given: GivenNumbers,
        in_others: Set[PlaceKey],
        file: Path | None = None,
    ) -> None:
        read = walk.tensors[content["model_tensors"] :]
        super().__init__(walk, read)
        self.file = file
        self.frame: Callable[..., Any] | None = None
        self._result = None if "frame" in content else builder(content["layout"], walk.tensors)
        self.alone: Callable[[list[Any], Sequence[torch.Tensor]], Any] | None = None
        self.is_tuned, self._has_failed = bool(content.get("files")), False
        if "run" in names:
            self._run = names["run"]
        else:
            backward = names.get("backward")
            if backward is not None and self.is_tuned:
                backward = self._watched(backward, content["files"])
            self._run = callable_of(content["facts"], names["forward"], backward)
        places = {number: walk.places[number] for number in content.get("exchanged", ())}
        places |= exchanged_elsewhere(walk, in_others)
        self.exchanged_there = list(places.values())
        self.exchanges = {
            number: place for number, place in places.items() if number < content["model_tensors"]
        }
        self._exchanged = (
            Exchanged(walk.exchanged | places, walk.tensors, content.get("grow", ()))
            if walk.exchanged or places
            else None
        )
        own = places.keys() - self.exchanges.keys()
        if own:
            kept = [t for i, t in enumerate(walk.tensors) if i >= content["model_tensors"] and i not in own]
            self._release({number: places[number] for number in own}, kept)
        sources = list(enumerate(content["inputs"]))
        self._inputs = [_held(kind, value, walk) for _, (kind, *value) in sources]
        self._lifted = self._inputs[: content.get("lifted", 0)]
        self._found = [
            (i, s[1])
            for i, s in sources
            if s[0] == "model" and self._exchanged is not None and s[1] in self._exchanged
        ]
        for position, _ in self._found:
            self._inputs[position] = None
        self._walked = walk.tensors
        self._given = [(i, source[1]) for i, source in sources if source[0] == "argument"]
        self._sizes = [(i, *source) for i, (kind, *source) in sources if kind == "size"]
        self._options = [
            (i, walk.optimizers[0].param_groups[source[1]], source[2])
            for i, source in sources
            if source[0] == "option"
        ]
        self._attributes = [
            (i, walk.owners[source[1]], source[2]) for i, source in sources if source[0] == "attribute"
        ]
        numbers = content.get("numbers", ())
        self._of_objects = [(walk.owners[owner], name) for owner, name in numbers]
        self.asks_of_model = bool(numbers or content.get("grow"))
        self._of_gradients = [(i, source[1]) for i, source in sources if source[0] == "gradient"]
        self._places_read = {id(tensor): i for i, tensor in enumerate(read)}
        self._arguments_read = content.get("arguments_read", {})
        self._reads_gradients = walk.gradients is not None
        self._gradients = Gradients(walk.tensors, walk.gradients or [])
        self.given, self.open, self._other_numbers = given, content["open"], content["other_numbers"]
        self._of_call = [(i, s[1]) for i, s in sources if s[0] == "number"]
        self._accepts, self._any_sizes = names.get("accepts"), content["any_sizes"]
        self._asked = [_what_is_asked(asked, walk, given, places) for asked in content["asked"] or ()]
        self.asks_bases = any(base is True for _, base in self._asked)
        self.changes = bool(content["facts"]["changed"])
        inputs = flat(self._inputs) if self.changes else ()
        self._own = [value for value in inputs if isinstance(value, torch.Tensor)]
        self._own_places = SamePlaces(self._own)
        self._storages = {value.untyped_storage().data_ptr() for value in self._own if value.numel()}

    @property
    def serves(self) -> tuple[bool, bool]:
        """Whether the plan serves many sizes, and whether it serves other numbers among the arguments."""
        return self._any_sizes, bool(self.open)

    def holds(self) -> bool:
        """Whether nothing has changed. Tensors that the plan mutates must not have moved in memory."""
        if self._has_failed or not super().holds() or not self._gradients.hold():
            return False
        if self._exchanged is not None and not self._exchanged.hold():
            return False
        if any(option_now(*option) is None for _, *option in self._options):
            return False
        if any(number_now(known(), name) is None for known, name in self._of_objects):
            return False
        if not self._own:
            return True
        memory = self._memory_found()
        return (
            self._own_places.hold() and self._storages.isdisjoint(memory) and len(set(memory)) == len(memory)
        )

    def _watched(self, backward: Callable[..., Any], results: Mapping[str, str]) -> Callable[..., Any]:
        """Wrap the backward graph of a tuned program.

        If it fails, the choice in ``results`` is struck and this plan no longer holds.
        """

        def run(given: list[Any]) -> Any:
            try:
                return backward(given)
            except Exception as error:
                self._has_failed = True
                importlib.import_module(_STRIKES).strike_for_backward(results, error)
                raise

        return never_traced(run)

    def _memory_found(self) -> list[int]:
        """The storage addresses of the tensors that each call may replace."""
        return self._gradients.memory() + (self._exchanged.memory() if self._exchanged is not None else [])

    def accepts(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether the graphs hold for these arguments.

        That depends on their sizes, on the numbers passed with them, and on which of them are read elsewhere
        too.
        """
        if not self._are_read_alike(arguments):
            return False
        if self.open and not (self.given.may_be(self.open) and self.given.are(self._other_numbers)):
            return False
        if self._accepts is None:
            return True
        asked = list[Any]()
        for value, name in self._asked:
            if type(name) is str:
                asked.append(number_now(value(), name))
            else:
                tensor = arguments[value] if type(value) is int else value()
                asked.append(tensor._base if name else tensor)
        return all(value is not None for value in asked) and bool(self._accepts(*asked))

    def _are_read_alike(self, arguments: Sequence[torch.Tensor]) -> bool:
        known = self._places_read
        if not known:
            return True
        found = {str(i): known[id(value)] for i, value in enumerate(arguments) if id(value) in known}
        return bool(found == self._arguments_read)

    def may_take(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether the plan can run on these arguments.

        If the plan reads gradients, no argument may have one. If it mutates tensors, no argument may share
        memory with a gradient or a tensor of the model.
        """
        ask = self.accepts if self.asks_of_model or self.open else self._are_read_alike
        if not ask(arguments):
            return False
        if self._reads_gradients and not have_none(arguments):
            return False
        if self._exchanged is not None and not self._exchanged.are_none_of(arguments):
            return False
        if not self.changes:
            return True
        given = [tensor.untyped_storage().data_ptr() for tensor in arguments if tensor.numel()]
        if not given:
            return True
        return self._storages.isdisjoint(given) and not set(given).intersection(self._memory_found())

    def graph(self, *inputs: Any) -> Sequence[Any]:
        """Call the graph with the inputs that Dynamo's code passes to it."""
        lifted = self._lifted
        if self._found:
            numbers = dict(self._found)
            lifted = [self._walked[numbers[i]] if i in numbers else value for i, value in enumerate(lifted)]
        return self._run([*lifted, *inputs])

    def __call__(
        self, arguments: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        if self._result is None:
            assert self.frame is not None
            return self.frame(*args, **kwargs)
        inputs = self._inputs_of(arguments)
        outputs = self._run(inputs) if self.alone is None else self.alone(inputs, arguments)
        return self._result(outputs, arguments)

    def strike(self) -> None:
        """Stop using the plan in this process and later ones, unless it comes from an archive."""
        if self.file is not None and self.file.suffix == SUFFIX:
            self._has_failed = True
            self.file.unlink(missing_ok=True)

    def _inputs_of(self, arguments: Sequence[torch.Tensor]) -> list[Any]:
        inputs: list[Any] = self._inputs.copy()
        for position, index in self._given:
            inputs[position] = arguments[index]
        for position, number in self._found:
            inputs[position] = self._walked[number]
        for position, index in self._of_gradients:
            inputs[position] = self._gradients[index]
        for position, known, name in self._attributes:
            inputs[position] = number_now(known(), name)
        for position, group, name in self._options:
            inputs[position] = torch.tensor(group[name], dtype=torch.float64)
        for position, place in self._of_call:
            inputs[position] = self.given.input(place)
        for position, where, index, method, dim in self._sizes:
            tensor = arguments[index] if where == "argument" else self._walked[index]
            inputs[position] = tensor.storage_offset() if dim is None else getattr(tensor, method)(dim)
        return inputs


_STRIKES = "fxpasses.tuning.struck"
"""Records failures of tuned programs. Imported only then, since the module that tunes calls through plans."""


def exchanged_elsewhere(walk: Walk, places: Set[PlaceKey]) -> dict[int, Place]:
    """The places in which other functions of the model put other tensors.

    Empty if a plan could not tell that those tensors differ only in their values.

    Args:
        walk: over the model.
        places: all such places.
    """
    found = {
        n: place for n, place in walk.places.items() if key_of(place) in places and n not in walk.exchanged
    }
    return found if places and are_alone([*walk.exchanged, *found], walk.tensors) else {}


def _held(kind: str, value: Sequence[Any], walk: Walk) -> Any:
    """An input that never changes: a tensor or process group of the model, or a float in the key."""
    if kind == "constant":
        return torch.tensor(value[0], dtype=torch.float64)
    if kind == "group":
        return walk.groups[value[0]]
    return walk.tensors[value[0]] if kind == "model" else None


def _what_is_asked(
    asked: Sequence[Any], walk: Walk, given: GivenNumbers, places: Mapping[int, Place]
) -> tuple[Any, str | bool]:
    """The argument to call a guard on numbers with.

    Returns:
        A function that returns an object and the name of its attribute; or a function that returns a tensor,
        or the index of an argument, and whether the guard is about its base.
    """
    place, value, detail = asked
    if place == "number":
        return lambda: given, value
    if place == "attribute":
        return walk.owners[value], detail
    if place == "argument":
        return value, detail
    if place == "model":
        return places[value].now if value in places else lambda: walk.tensors[value], detail
    return lambda: value, detail
