"""The inputs of a recorded graph: where each comes from, and the guards on their sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fake.symbols.shape_guards import CompiledGuards, guards_of
from fake.symbols.terms import properties_of
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.inputs.arguments import sources_of
from fxpasses.plans.objects._torch_optimizers import Option
from fxpasses.plans.objects.named_attributes import Names, current_integer
from fxpasses.plans.recording import _torch_compiled as _t
from fxpasses.plans.recording.generated import Module, used_parameters
from fxpasses.plans.recording.recorded_trace import RecordedTrace
from fxpasses.plans.walks.walk import Walk


class RecordedInputs:
    """The inputs of the compiled form of Dynamo's graph: first the graph's tensor attributes, then its own
    inputs.

    Attributes:
        lifted: how many are attributes.
        sources: where each comes from; see :func:`~fxpasses.plans.inputs.arguments.sources_of`.
        given: maps parameter names to the places of numbers among the arguments.
        open: maps places of those that are inputs to their kinds, ``"int"`` or ``"float"``.
        grow: the numbers of the model's tensors whose sizes may differ in each call.
        attributes: by guard name, the integers in objects that may differ in each call: the object's number
            and the attribute.
    """

    def __init__(self) -> None:
        self.lifted = 0
        self.sources: list[list[Any]] = []
        self.given: dict[str, str] = {}
        self.open: dict[str, str] = {}
        self.attributes: dict[str, tuple[int, str]] = {}
        self.grow = frozenset[int]()
        self._names, self._numbers = list[str](), list[list[Any] | None]()
        self._places, self._frame_has_sizes = dict[str, list[Any]](), False
        self._floats = dict[str, Any]()
        self._guards: tuple[CompiledGuards, ...] | None = None

    @property
    def are_fixed(self) -> bool:
        """Whether the graph holds only for these sizes."""
        return self._guards is None

    @property
    def any_sizes(self) -> bool:
        """Whether the guards on numbers say all that a graph needs to know about sizes of tensors."""
        kinds = {number[0] for number in self._numbers if number is not None}
        of_sizes = not kinds <= {"attribute", "constant", "option", "float"} or self._frame_has_sizes
        return not self.are_fixed and (of_sizes or not (self.attributes or self.open))

    @property
    def options(self) -> list[Option]:
        """The inputs that are floats held by an optimizer and may differ in each call."""
        return [(n[1], n[2]) for n in self._numbers if n is not None and n[0] == "option"]

    def note_graph(self, graph: fx.Graph) -> None:
        """Note what Dynamo's graph takes."""
        self._names, self._numbers = _t.input_names_and_numbers(graph, self.lifted)
        self._floats = _t.symbolic_float_arguments(graph)

    def compile_guards(self, shape_env: Any) -> None:
        """Compile the guards on numbers."""
        if not any(self._numbers) and not self.attributes:
            return
        guards = guards_of(shape_env)
        self._guards = tuple(guards.compile(static=static) for static in (False, True))

    def compile_frame_guards(self, shape_env: Any) -> None:
        """Compile the guards on numbers for a frame without a graph. ``shape_env`` is that of its symbols."""
        sizes = [p for p in properties_of(shape_env) if p.kind != "number"]
        if not all(p.expression.is_number for p in sizes) and {p.root for p in sizes} <= self._places.keys():
            self._frame_has_sizes = True
        if self._frame_has_sizes or self.attributes:
            guards = guards_of(shape_env)
            self._guards = tuple(guards.compile(static=static) for static in (False, True))

    def find_symbolic(self, trace: RecordedTrace, arguments: Sequence[torch.Tensor], walk: Walk) -> Names:
        """Find integers and tensor sizes in objects that may differ in each call. Returns the names of read
        attributes, including these.

        Args:
            trace: of the frame.
            arguments: the tensors among the arguments.
            walk: over the model, and all that is read up to these attributes.
        """
        names, known = trace.names(walk), {id(tensor): i for i, tensor in enumerate(arguments)}
        self._places = {t: ["argument", known[id(v)]] for t, v in trace.tensors.items() if id(v) in known}
        growing = {
            text: id(trace.tensors[text]) for text in _with_symbolic_sizes(trace) - self._places.keys()
        }
        if not growing and not trace.numbers:
            return names
        trial = walk.fork()
        trial.close(names)
        met = {id(t): i for i, t in enumerate(trial.tensors) if i >= len(walk.tensors) and i in trial.places}
        self.grow = frozenset(met[tensor] for tensor in growing.values() if tensor in met)
        met |= {id(tensor): i for i, tensor in enumerate(walk.tensors)}  # the key has their sizes
        self._places |= {text: ["model", met[tensor]] for text, tensor in growing.items() if tensor in met}
        return self._with_numbers(replace(names, grow=self.grow), trace.numbers, trial)

    def _with_numbers(self, names: Names, numbers: Mapping[str, tuple[Any, str]], trial: Walk) -> Names:
        owners = {id(known()): i for i, known in enumerate(trial.owners)}
        places = {place: (owners.get(id(owner)), name) for place, (owner, name) in numbers.items()}
        self.attributes = {
            place: (i, name)
            for place, (i, name) in places.items()
            if i is not None and current_integer(numbers[place][0], name) is not None
        }
        missing = {name for place, (_, name) in numbers.items() if place not in self.attributes}
        relied_on = names.relied_on | missing
        return replace(
            names,
            named=names.named | relied_on,
            relied_on=relied_on,
            numbers=frozenset(self.attributes.values()),
        )

    def note_sources(self, inputs: Sequence[Any], walk: Walk, arguments: Sequence[torch.Tensor]) -> None:
        """Note where the inputs come from.

        Args:
            inputs: those of a call.
            walk: over the model.
            arguments: the tensors among the arguments.

        Raises:
            NoPlan: one comes from elsewhere.
        """
        gradients = {i: walk.tensors[i].grad for i, facts in walk.gradients or () if facts}
        known = [self._resolved(number) for number in self._numbers]
        self.sources = sources_of(inputs, walk.tensors, arguments, known, gradients, walk.groups)
        if any(source[0] != "model" for source in self.sources[: self.lifted]):
            raise NoPlan("a graph that holds tensors of others")

    def fix_floats(self, given: Mapping[str, int | float]) -> None:
        """Make floats constants if the backward pass guards on them. ``given`` maps places to numbers."""
        fixed = {self.given.get(name) for name, number in self._floats.items() if not _t.is_unguarded(number)}
        for source in self.sources:
            if source[0] == "number" and source[1] in fixed:
                source[:] = ["constant", given[source[1]]]
        self.open = {place: kind for place, kind in self.open.items() if place not in fixed}

    def _resolved(self, number: list[Any] | None) -> list[Any] | None:
        if number is not None and number[0] in ("attribute", "float") and number[1] in self.given:
            place = self.given[number[1]]
            self.open[place] = "float" if number[0] == "float" else "int"
            return ["number", place]
        if number is not None and number[0] == "float":
            return ["constant"]
        if number is None or number[0] != "attribute":
            return number
        if number[1] not in self.attributes:
            raise NoPlan("a symbolic number that is no size of an input", number[1])
        return ["attribute", *self.attributes[number[1]]]

    def guard_arguments(self, module: Module) -> list[list[Any]] | None:
        """The arguments of the guards on sizes, or None if there are none. The guards are added to
        ``module``.

        Raises:
            NoPlan: they need a value that cannot be passed to them.
        """
        if self._guards is None:
            return None
        guards = self._guards[self.any_sizes or not (self.attributes or self.open)]
        used = used_parameters(guards.code)
        asks = {name: self._guard_argument(guards.inputs[i]) for name, i in used.items()}
        if any(place in ("gradient", "option") for place, *_ in asks.values()):
            raise NoPlan("a symbolic size of a gradient")
        # Of a base, Dynamo guards on what is symbolic and nothing else: it is no input of the graph.
        known = [
            name
            for name, (place, number, detail) in asks.items()
            if (place == "model" and number not in self.grow)
            or (detail and place not in ("attribute", "number"))
        ]
        return [asks[name] for name in module.add_guards(guards.code, known)]

    def _guard_argument(self, place: str) -> list[Any]:
        if place in self.given:
            return ["number", self.given[place], False]
        if place in self.attributes:
            return ["attribute", *self.attributes[place]]
        tensor = _t.tensor_source(place)
        if tensor in self._names:
            source = self.sources[self._names.index(tensor)]
        elif tensor in self._places:
            source = self._places[tensor]
        else:
            raise NoPlan("a guard on a size that is no input of the graph", place)
        return [*source, place != tensor]


def _with_symbolic_sizes(trace: RecordedTrace) -> set[str]:
    """The guard names of a frame's tensors with a symbolic size, stride or offset."""
    properties = properties_of(trace.shape_env) if trace.shape_env is not None else ()
    found = {p.root for p in properties if p.kind != "number" and not p.expression.is_number}
    return found & trace.tensors.keys()


def version_counters(inputs: Sequence[Any]) -> list[int]:
    """The version counter of each tensor that has one."""
    return [t._version for t in inputs if isinstance(t, torch.Tensor) and not t.is_inference()]


def check_mutated_inputs(inputs: Sequence[Any], facts: Mapping[str, Any]) -> None:
    """Check that no inputs share memory if one is mutated, since who sees the mutation is part of what was
    compiled.

    Args:
        inputs: of the graph.
        facts: of the compilation; see :func:`fxpasses.plans.recording._torch_facts.runtime_facts`.

    Raises:
        NoPlan: some do, or the graph does not take these inputs.
    """
    if not facts:
        raise NoPlan("a graph that runs in eager")
    infos: list[Any] = facts["metadata"].input_info
    if len(inputs) != len(infos):
        raise NoPlan("a graph whose inputs are rearranged")
    if not any(info.mutates_data or info.mutates_metadata for info in infos):
        return
    places = [t.untyped_storage().data_ptr() for t in inputs if isinstance(t, torch.Tensor) and t.numel()]
    if len(set(places)) != len(places):
        raise NoPlan("changed tensors among tensors that share memory")
