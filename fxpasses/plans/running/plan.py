"""A loaded plan: its checks before each call, and the call itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch

from fxpasses.plans.files.plan_files import SUFFIX
from fxpasses.plans.graph_breaks._torch_frames import skipped_by_dynamo
from fxpasses.plans.inputs.exchanged import Exchanged, Place, PlaceKey, are_exchangeable, key_of
from fxpasses.plans.inputs.given_numbers import GivenNumbers
from fxpasses.plans.inputs.parameter_gradients import Gradients, have_no_gradients
from fxpasses.plans.objects._torch_optimizers import current_option
from fxpasses.plans.objects.named_attributes import current_integer
from fxpasses.plans.running.runtime import aot_callable
from fxpasses.plans.tensors.held_views import HeldViews
from fxpasses.plans.tensors.same_tensors import SameDataPointers, SameTensors
from fxpasses.plans.tensors.shards import flatten_sharded
from fxpasses.plans.walks.results import result_builder
from fxpasses.plans.walks.walk import Walk


class CheckedWalk:
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

    def allow_view_caching(self, views: HeldViews) -> None:
        """Let ``views`` cache views of the tensors until one of the tensors may have moved."""
        self._tensors.allow_view_caching(views)


class Plan(CheckedWalk):
    """A loaded plan, bound to the model that it was checked for.

    ``walk`` continued from the model's walk over what the plan reads.

    Attributes:
        file: the file of the plan.
        frame: runs the whole frame, if the frame does more than call its graph.
        alone: runs the graph, if gradients are on and the plan has no backward graph.
        exchanges: by number, the places of the model's tensors that each call may replace.
        exchanged_places: all such places.
        reads_model_numbers: whether it depends on numbers or sizes that objects of the model hold. While the plan
            holds, it can be asked whether it accepts them.
        reads_bases: whether it depends on sizes of the bases of arguments that are views.
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
        exchanged_entries: Set[PlaceKey],
        file: Path | None = None,
    ) -> None:
        read = walk.tensors[content["model_tensors"] :]
        super().__init__(walk, read)
        self.file = file
        self.frame: Callable[..., Any] | None = None
        self._result = None if "frame" in content else result_builder(content["layout"], walk.tensors)
        self.forward_alone: Callable[[list[Any], Sequence[torch.Tensor]], Any] | None = None
        self.is_tuned, self._has_failed = bool(content.get("files")), False
        if "run" in names:
            self._run = names["run"]
        else:
            backward = names.get("backward")
            if backward is not None and self.is_tuned:
                backward = self._strike_on_failure(backward, content["files"])
            self._run = aot_callable(content["facts"], names["forward"], backward)
        places = {number: walk.places[number] for number in content.get("exchanged", ())}
        places |= exchanged_elsewhere(walk, exchanged_entries)
        self.exchanged_places = list(places.values())
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
        self._inputs = [_constant_input(kind, value, walk) for _, (kind, *value) in sources]
        self._lifted = self._inputs[: content.get("lifted", 0)]
        self._exchanged_inputs = [
            (i, s[1])
            for i, s in sources
            if s[0] == "model" and self._exchanged is not None and s[1] in self._exchanged
        ]
        for position, _ in self._exchanged_inputs:
            self._inputs[position] = None
        self._walked_tensors = walk.tensors
        self._argument_inputs = [(i, source[1]) for i, source in sources if source[0] == "argument"]
        self._size_inputs = [(i, *source) for i, (kind, *source) in sources if kind == "size"]
        self._option_inputs = [
            (i, walk.optimizers[0].param_groups[source[1]], source[2])
            for i, source in sources
            if source[0] == "option"
        ]
        self._attribute_inputs = [
            (i, walk.owners[source[1]], source[2]) for i, source in sources if source[0] == "attribute"
        ]
        numbers = content.get("numbers", ())
        self._object_numbers = [(walk.owners[owner], name) for owner, name in numbers]
        self.reads_model_numbers = bool(numbers or content.get("grow"))
        self._gradient_inputs = [(i, source[1]) for i, source in sources if source[0] == "gradient"]
        self._tensors_read = {id(tensor): i for i, tensor in enumerate(read)}
        self._arguments_read = content.get("arguments_read", {})
        self._reads_gradients = walk.gradients is not None
        self._gradients = Gradients(walk.tensors, walk.gradients or [])
        self.given, self.open, self._other_numbers = given, content["open"], content["other_numbers"]
        self._number_inputs = [(i, s[1]) for i, s in sources if s[0] == "number"]
        self._accepts, self._any_sizes = names.get("accepts"), content["any_sizes"]
        self._guard_arguments = [
            _guard_argument(asked, walk, given, places) for asked in content["asked"] or ()
        ]
        self.reads_bases = any(base is True for _, base in self._guard_arguments)
        self.changes = bool(content["facts"]["changed"])
        inputs = flatten_sharded(self._inputs) if self.changes else ()
        self._mutable_tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        self._mutable_pointers = SameDataPointers(self._mutable_tensors)
        self._storages = {
            value.untyped_storage().data_ptr() for value in self._mutable_tensors if value.numel()
        }

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
        if any(current_option(*option) is None for _, *option in self._option_inputs):
            return False
        if any(current_integer(known(), name) is None for known, name in self._object_numbers):
            return False
        if not self._mutable_tensors:
            return True
        storage_addresses = self._replaceable_addresses()
        return (
            self._mutable_pointers.hold()
            and self._storages.isdisjoint(storage_addresses)
            and len(set(storage_addresses)) == len(storage_addresses)
        )

    def _strike_on_failure(
        self, backward: Callable[..., Any], results: Mapping[str, str]
    ) -> Callable[..., Any]:
        """Wrap the backward graph of a tuned program.

        If it fails, the choice in ``results`` is struck and this plan no longer holds.
        """

        def run(given: list[Any]) -> Any:
            try:
                return backward(given)
            except Exception as error:
                self._has_failed = True
                importlib.import_module(_STRIKES_MODULE).strike_for_backward(results, error)
                raise

        return skipped_by_dynamo(run)

    def _replaceable_addresses(self) -> list[int]:
        """The storage addresses of the tensors that each call may replace."""
        return self._gradients.storage_addresses() + (
            self._exchanged.storage_addresses() if self._exchanged is not None else []
        )

    def accepts(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether the graphs hold for these arguments.

        That depends on their sizes, on the numbers passed with them, and on which of them are read elsewhere
        too.
        """
        if not self._have_same_reads(arguments):
            return False
        if self.open and not (
            self.given.fit_kinds(self.open) and self.given.have_values(self._other_numbers)
        ):
            return False
        if self._accepts is None:
            return True
        asked = list[Any]()
        for value, name in self._guard_arguments:
            if type(name) is str:
                asked.append(current_integer(value(), name))
            else:
                tensor = arguments[value] if type(value) is int else value()
                asked.append(tensor._base if name else tensor)
        return all(value is not None for value in asked) and bool(self._accepts(*asked))

    def _have_same_reads(self, arguments: Sequence[torch.Tensor]) -> bool:
        known = self._tensors_read
        if not known:
            return True
        found = {str(i): known[id(value)] for i, value in enumerate(arguments) if id(value) in known}
        return bool(found == self._arguments_read)

    def can_run_on(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether the plan can run on these arguments.

        If the plan reads gradients, no argument may have one. If it mutates tensors, no argument may share
        memory with a gradient or a tensor of the model.
        """
        check = self.accepts if self.reads_model_numbers or self.open else self._have_same_reads
        if not check(arguments):
            return False
        if self._reads_gradients and not have_no_gradients(arguments):
            return False
        if self._exchanged is not None and not self._exchanged.are_disjoint_from(arguments):
            return False
        if not self.changes:
            return True
        given = [tensor.untyped_storage().data_ptr() for tensor in arguments if tensor.numel()]
        if not given:
            return True
        return self._storages.isdisjoint(given) and not set(given).intersection(self._replaceable_addresses())

    def graph(self, *inputs: Any) -> Sequence[Any]:
        """Call the graph with the inputs that Dynamo's code passes to it."""
        lifted = self._lifted
        if self._exchanged_inputs:
            numbers = dict(self._exchanged_inputs)
            lifted = [
                self._walked_tensors[numbers[i]] if i in numbers else value for i, value in enumerate(lifted)
            ]
        return self._run([*lifted, *inputs])

    def __call__(
        self, arguments: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        if self._result is None:
            assert self.frame is not None
            return self.frame(*args, **kwargs)
        inputs = self._inputs_of(arguments)
        outputs = self._run(inputs) if self.forward_alone is None else self.forward_alone(inputs, arguments)
        return self._result(outputs, arguments)

    def strike(self) -> None:
        """Stop using the plan in this process and later ones, unless it comes from an archive."""
        if self.file is not None and self.file.suffix == SUFFIX:
            self._has_failed = True
            self.file.unlink(missing_ok=True)

    def _inputs_of(self, arguments: Sequence[torch.Tensor]) -> list[Any]:
        inputs: list[Any] = self._inputs.copy()
        for position, index in self._argument_inputs:
            inputs[position] = arguments[index]
        for position, number in self._exchanged_inputs:
            inputs[position] = self._walked_tensors[number]
        for position, index in self._gradient_inputs:
            inputs[position] = self._gradients[index]
        for position, known, name in self._attribute_inputs:
            inputs[position] = current_integer(known(), name)
        for position, group, name in self._option_inputs:
            inputs[position] = torch.tensor(group[name], dtype=torch.float64)
        for position, place in self._number_inputs:
            inputs[position] = self.given.as_input(place)
        for position, where, index, method, dim in self._size_inputs:
            tensor = arguments[index] if where == "argument" else self._walked_tensors[index]
            inputs[position] = tensor.storage_offset() if dim is None else getattr(tensor, method)(dim)
        return inputs


_STRIKES_MODULE = "fxpasses.tuning.struck"
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
    return found if places and are_exchangeable([*walk.exchanged, *found], walk.tensors) else {}


def _constant_input(kind: str, value: Sequence[Any], walk: Walk) -> Any:
    """An input that never changes: a tensor or process group of the model, or a float in the key."""
    if kind == "constant":
        return torch.tensor(value[0], dtype=torch.float64)
    if kind == "group":
        return walk.groups[value[0]]
    return walk.tensors[value[0]] if kind == "model" else None


def _guard_argument(
    asked: Sequence[Any], walk: Walk, given: GivenNumbers, places: Mapping[int, Place]
) -> tuple[Any, str | bool]:
    """The argument to call a guard on numbers with.

    Returns:
        A function that returns an object and the name of its attribute; or a function that returns a tensor,
        or the index of an argument, and whether the guard is about its base.
    """
    place, value, detail = asked
    if place == "number":
        return lambda: given.values, value
    if place == "attribute":
        return walk.owners[value], detail
    if place == "argument":
        return value, detail
    if place == "model":
        return places[value].now if value in places else lambda: walk.tensors[value], detail
    return lambda: value, detail
