"""Plans that were loaded, and where they are looked for: the directory of plans."""

from __future__ import annotations

import hashlib
import json
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from fxpasses.counters import counters
from fxpasses.plans import _torch, native
from fxpasses.plans._torch_optimizers import option_now
from fxpasses.plans.arguments import SameArguments, described_arguments, without_sizes
from fxpasses.plans.between import Functions, stubs_named
from fxpasses.plans.errors import NoPlan, PlanFileError
from fxpasses.plans.frames import PYTHON, frame_of, in_python
from fxpasses.plans.gradients import Gradients, have_none
from fxpasses.plans.held_views import HeldViews
from fxpasses.plans.named_attributes import number_now
from fxpasses.plans.plan_files import are_unchanged, candidates, read_sections
from fxpasses.plans.reads import walk_reads
from fxpasses.plans.references import reference_to
from fxpasses.plans.replaced import are_named_still, watch_names
from fxpasses.plans.results import builder
from fxpasses.plans.runtime import callable_of, load_code, load_library
from fxpasses.plans.same_tensors import SamePlaces, SameTensors
from fxpasses.plans.walk import Walk

log = logging.getLogger(__name__)


class _Checked:
    """A walk whose findings can be looked at again quickly."""

    def __init__(self, walk: Walk, tensors: Sequence[torch.Tensor]) -> None:
        self._watch, self._tensors = walk.watch, SameTensors(tensors)

    def holds(self) -> bool:
        """Whether everything is as it was."""
        return self._watch.holds() and self._tensors.hold()

    def let_hold(self, views: HeldViews) -> None:
        """Let views of the tensors be held until one may have moved."""
        self._tensors.let_hold(views)


class Plan(_Checked):
    """A plan that was loaded, for the model that it was checked for: ``walk`` went on from the model's over what it reads.

    Attributes:
        file: where it is.
        frame: where it is more than a call of its graph, what runs all of it.
        asks_bases: whether it depends on sizes of tensors of which arguments are views.
        is_tuned: whether it is a program that was chosen by measuring: where it fails, the default may not.
    """

    def __init__(
        self, content: Mapping[str, Any], names: Mapping[str, Any], walk: Walk, file: Path | None = None
    ) -> None:
        read = walk.tensors[content["model_tensors"] :]
        super().__init__(walk, read)
        self.file = file
        self.frame: Callable[..., Any] | None = None
        self._result = None if "frame" in content else builder(content["layout"], walk.tensors)
        self._run = (
            names["run"]
            if "run" in names
            else callable_of(content["facts"], names["forward"], names.get("backward"))
        )
        sources = list(enumerate(content["inputs"]))
        self._inputs = [_held(kind, value, walk) for _, (kind, *value) in sources]
        self._lifted = self._inputs[: content.get("lifted", 0)]
        self._given = [(i, source[1]) for i, source in sources if source[0] == "argument"]
        self._numbers = [(i, *source) for i, source in sources if source[0] not in _NO_SIZES]
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
        self._of_gradients = [(i, source[1]) for i, source in sources if source[0] == "gradient"]
        self._places_read = {id(tensor): i for i, tensor in enumerate(read)}
        self._arguments_read = content.get("arguments_read", {})
        self._reads_gradients = walk.gradients is not None
        self._gradients = Gradients(walk.tensors, walk.gradients or [])
        self._accepts, self._any_sizes = names.get("accepts"), content["any_sizes"]
        self._asked = [_what_is_asked(asked, walk) for asked in content["asked"] or ()]
        self.asks_bases = any(base is True for _, base in self._asked)
        self.is_tuned = bool(content.get("files"))
        self._changes = bool(content["facts"]["changed"])
        self._own = [value for value in self._inputs if value is not None] if self._changes else []
        self._own_places = SamePlaces(self._own)
        self._storages = {value.untyped_storage().data_ptr() for value in self._own if value.numel()}

    @property
    def is_dynamic(self) -> bool:
        """Whether it is one for many sizes."""
        return self._any_sizes

    def holds(self) -> bool:
        """Whether everything is as it was; where the plan changes tensors, also where the memory of each is."""
        if not super().holds() or not self._gradients.hold():
            return False
        if any(option_now(*option) is None for _, *option in self._options):
            return False
        if any(number_now(known(), name) is None for known, name in self._of_objects):
            return False
        if not self._own:
            return True
        memory = self._gradients.memory()
        return (
            self._own_places.hold() and self._storages.isdisjoint(memory) and len(set(memory)) == len(memory)
        )

    def accepts(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether the graphs hold for the sizes of these arguments, and for which of them are read elsewhere, too."""
        if not self._are_read_alike(arguments):
            return False
        if self._accepts is None:
            return True
        asked = list[Any]()
        for value, name in self._asked:
            if type(name) is str:
                asked.append(number_now(value(), name))
            else:
                tensor = arguments[value] if type(value) is int else value
                asked.append(tensor._base if name else tensor)
        return all(value is not None for value in asked) and bool(self._accepts(*asked))

    def _are_read_alike(self, arguments: Sequence[torch.Tensor]) -> bool:
        known = self._places_read
        if not known:
            return True
        found = {str(i): known[id(value)] for i, value in enumerate(arguments) if id(value) in known}
        return bool(found == self._arguments_read)

    def may_take(self, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether no argument has a gradient, where the plan reads gradients, nor shares memory with one or with a tensor of the model, where it changes tensors."""
        if not (self.accepts(arguments) if self._of_objects else self._are_read_alike(arguments)):
            return False
        if self._reads_gradients and not have_none(arguments):
            return False
        if not self._changes:
            return True
        given = [tensor.untyped_storage().data_ptr() for tensor in arguments if tensor.numel()]
        if not given:
            return True
        return self._storages.isdisjoint(given) and not set(given).intersection(self._gradients.memory())

    def graph(self, *inputs: Any) -> Sequence[Any]:
        """Its graph, called as Dynamo's code calls it."""
        return self._run([*self._lifted, *inputs])

    def __call__(
        self, arguments: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        if self._result is None:
            assert self.frame is not None
            return self.frame(*args, **kwargs)
        return self._result(self._run(self._inputs_of(arguments)), arguments)

    def _inputs_of(self, arguments: Sequence[torch.Tensor]) -> list[Any]:
        inputs: list[Any] = self._inputs.copy()
        for position, index in self._given:
            inputs[position] = arguments[index]
        for position, index in self._of_gradients:
            inputs[position] = self._gradients[index]
        for position, known, name in self._attributes:
            inputs[position] = number_now(known(), name)
        for position, group, name in self._options:
            inputs[position] = torch.tensor(group[name], dtype=torch.float64)
        for position, method, index, dim in self._numbers:
            tensor = arguments[index]
            inputs[position] = tensor.storage_offset() if dim is None else getattr(tensor, method)(dim)
        return inputs


_NO_SIZES = ("argument", "model", "gradient", "constant", "option", "attribute")
"""Kinds of inputs that are no sizes, strides or offsets."""


def _held(kind: str, value: Sequence[Any], walk: Walk) -> torch.Tensor | None:
    """An input that is the same in each call: a tensor of the model, or a float that the key has."""
    if kind == "constant":
        return torch.tensor(value[0], dtype=torch.float64)
    return walk.tensors[value[0]] if kind == "model" else None


def _what_is_asked(asked: Sequence[Any], walk: Walk) -> tuple[Any, str | bool]:
    """What a guard on numbers is called with: an object and the name of its attribute, or a tensor, or the number of an argument, and whether it is about what that is a view of."""
    place, value, detail = asked
    if place == "attribute":
        return walk.owners[value], detail
    return walk.tensors[value] if place == "model" else value, detail


class Armed(_Checked):
    """A walk over the model and objects among its arguments, and the plans that hold as long as nothing of them changes."""

    def __init__(
        self, model: Any, objects: Sequence[Any], walk: Walk, digest: list[Any], functions: Functions
    ) -> None:
        """Args: what was walked over, the walk and what it returned, and the functions between the model's graphs."""
        super().__init__(walk, walk.tensors)
        self.model, self.walk, self.digest, self.functions = model, walk, digest, functions
        itself = weakref.ref(self)

        def gone(reference: Any) -> None:
            if (armed := itself()) is not None:
                armed._let_go()

        self._objects = [reference_to(value, gone) for value in objects]
        self._plans: dict[Any, list[Plan]] = {}
        self._dynamic: dict[Any, list[Plan]] = {}
        self._quick: list[tuple[_torch.SameState, SameArguments, Plan]] = []
        self._places = {id(tensor): i for i, tensor in enumerate(walk.tensors)}

    def quick_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Plan, list[torch.Tensor]] | None:
        """The same as :meth:`call` where that can be told quickly. Args: those of a call."""
        are_held = False
        for state, same, plan in self._quick:
            if state.holds() and (tensors := same.tensors(args, kwargs)) is not None:
                are_held = are_held or self.holds()
                if not are_held:
                    return None
                if plan.holds() and plan.may_take(tensors):
                    return plan, tensors
        return None

    def call(
        self, now: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Plan, list[torch.Tensor]] | None:
        """The plan of a call and the tensors among its arguments, if one is known and everything is as it was.

        Args:
            now: the state of torch.
            args: the arguments.
            kwargs: those given by name.

        Raises:
            NoPlan: an argument is of a kind that plans do not know.
        """
        tokens, tensors, objects = described_arguments(args, kwargs, self.place)
        if not self.is_for(objects):
            return None
        plans = (*self._plans.get((now, tokens), ()), *self._of_other_sizes(now, tokens, tensors))
        if not plans or not self.holds():
            return None
        known = next((plan for plan in plans if plan.holds() and plan.may_take(tensors)), None)
        if known is None:
            return None
        if (
            len(self._quick) < _QUICKEST
            and not known.asks_bases
            and SameArguments.can_compare(args, kwargs, tensors, objects)
            and all(self.place(tensor) is None for tensor in tensors)
        ):
            same = SameArguments(args, kwargs, tensors, objects, self.walk.tensors)
            self._quick.append((_torch.SameState(), same, known))
        return known, tensors

    def _of_other_sizes(self, now: Any, tokens: Any, tensors: Sequence[torch.Tensor]) -> Iterator[Plan]:
        if self._dynamic:
            plans = self._dynamic.get((now, without_sizes(tokens)), ())
            yield from (plan for plan in plans if plan.accepts(tensors))

    def know(self, now: Any, tokens: Any, plan: Plan) -> None:
        """Keep a plan for later calls.

        Args:
            now: the surroundings that it was made in.
            tokens: of the arguments that it was made for.
            plan: the plan.
        """
        known = self._dynamic if plan.is_dynamic else self._plans
        plans = known.setdefault((now, without_sizes(tokens) if plan.is_dynamic else tokens), [])
        others = [one for one in plans if one.file is None or one.file != plan.file]
        kept = [plan, *others][:_QUICKEST]
        gone = [one for one in plans if one not in kept]
        self._quick = [quick for quick in self._quick if quick[2] not in gone]
        plans[:] = kept

    def is_for(self, objects: Sequence[Any]) -> bool:
        """Whether these are the objects."""
        return len(objects) == len(self._objects) and all(
            value is known() for value, known in zip(objects, self._objects, strict=True)
        )

    def _let_go(self) -> None:
        """One of the objects is gone: nothing that it held is kept, and no other object that takes its place is taken for it."""
        for known in (self._quick, self._plans, self._dynamic, self._places):
            known.clear()
        self.walk = Walk(leaves_open=True)
        super().__init__(self.walk, ())

    def place(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor that is part of the model."""
        return self._places.get(id(tensor))


_QUICKEST = 8
"""The most kinds of arguments, and the most plans for one of them, that are compared one by one."""


class Shelf(Protocol):
    """A place where plans are."""

    def find(
        self, abouts: Sequence[Mapping[str, Any]], armed: Armed, tensors: Sequence[torch.Tensor]
    ) -> Plan | None:
        """The plan that was made of the same, and whose checks hold.

        Args:
            abouts: the factors of a plan for these sizes, and of one for many.
            armed: the model.
            tensors: those among the arguments.
        """

    def target(self, about: Mapping[str, Any]) -> Path | None:
        """The folder for a new plan, or None where there are to be none."""

    def refuse(self, error: NoPlan) -> None:
        """There can be no plan of a call: return, for it to be compiled, or raise."""


class Directory:
    """The plans in a directory; what has none is compiled, and its plan is written there."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def target(self, about: Mapping[str, Any]) -> Path:
        """The folder for a new plan."""
        return self._path / hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    def refuse(self, error: NoPlan) -> None:
        """Count it."""
        counters.count_refused_plan(error.reason)
        log.info("no plan: %s", error)

    def find(
        self, abouts: Sequence[Mapping[str, Any]], armed: Armed, tensors: Sequence[torch.Tensor]
    ) -> Plan | None:
        """The plan of an earlier process. Args: those of :meth:`Shelf.find`.

        Raises:
            NoPlan: an earlier process has found that there can be none.
        """
        found = (self._find(about, armed, tensors) for about in abouts)
        return next((plan for plan in found if plan is not None), None)

    def _find(self, about: Mapping[str, Any], armed: Armed, tensors: Sequence[torch.Tensor]) -> Plan | None:
        for path in candidates(self.target(about)):
            try:
                sections = read_sections(path)
                content = json.loads(sections["plan"])
                if content["about"] != about:
                    raise PlanFileError(path, "it is the plan of something else")
            except (PlanFileError, OSError) as error:
                log.warning("a plan is left aside: %s", error)
                counters.count_refused_plan("a damaged file")
                continue
            walk = _walked(content, armed)
            if walk is None:
                continue
            if "refused" in content:
                raise NoPlan(content["refused"])
            try:
                if not are_unchanged(content["files"]):
                    continue
                plan = loaded(content, sections, self._path, walk, armed, path)
                if plan.accepts(tensors):
                    return plan
            except (OSError, ImportError, PlanFileError) as error:
                log.warning("a plan is left aside: %s", error)
                counters.count_refused_plan("kernels that cannot be loaded")
        return None


def loaded(
    content: Mapping[str, Any],
    sections: Mapping[str, bytes],
    folder: Path | None,
    walk: Walk,
    armed: Armed,
    file: Path | None = None,
) -> Plan:
    """Load the code and the kernels of a plan whose checks hold.

    Args:
        content: what its file says.
        sections: of its file.
        folder: where kernels are put to be loaded, or None for a place that is gone afterwards.
        walk: over the model and what the plan reads.
        armed: the model.
        file: where it is.
    """
    if content["kind"] == PYTHON:
        # Where its frame calls a graph, it is one that does nothing: Dynamo hands no backend such a graph.
        no_graph = {"run": lambda inputs: (), "accepts": lambda: True}
        if "code" in sections:  # what is asked of numbers
            no_graph |= {"accepts": load_code(sections["code"], {}, {}, [], folder)["accepts"]}
        return _made(content, no_graph, walk, armed, sections.get("frame", b""), file)
    prefix = "kernel "
    if "check" in sections:
        native.use(lambda: load_library(native.ENTRY, sections["check"], folder))
    kernels = {n.removeprefix(prefix): data for n, data in sections.items() if n.startswith(prefix)}
    names = load_code(sections["code"], kernels, content["externs"], content["constants"], folder)
    plan = _made(content, names, walk, armed, sections.get("frame", b""), file)
    for checked in (armed, plan):
        checked.let_hold(names["held_views"])
    return plan


def _walked(content: Mapping[str, Any], armed: Armed) -> Walk | None:
    """The walk over the model, gone on over what a plan reads; ``None`` where that is not what it was."""
    walk = armed.walk.fork()
    same = (
        walk_reads(walk, content["reads"], content["read"]) == content["read"]
        and are_named_still(content["functions"])
        and stubs_named(content.get("between", ())) is not None
    )
    return walk if same else None


def _made(
    content: Mapping[str, Any],
    names: Mapping[str, Any],
    walk: Walk,
    armed: Armed,
    frame: bytes,
    file: Path | None = None,
) -> Plan:
    watch_names(walk, content["functions"])
    plan = Plan(content, names, walk, file)
    if "frame" in content:
        stubs = stubs_named(content.get("between", ())) or []
        if content["frame"] is None:
            plan.frame = in_python(armed.model, armed.functions, stubs)
        else:
            plan.frame = frame_of(content["frame"], frame, armed.model, plan.graph, armed.functions, stubs)
    return plan


@dataclass
class Without:
    """Calls of which there was no plan: of which contents of the model, and how often one was looked for since there was one."""

    contents: list[Any] = field(default_factory=list)
    calls: int = 0


@dataclass(frozen=True)
class Held:
    """A plan for this process: of a program that cannot be written.

    Attributes:
        content: what its file would say.
        frame: the code of its frame.
        program: what runs its graph; takes the inputs that Dynamo's graph has.
    """

    content: Mapping[str, Any]
    frame: bytes
    program: Callable[..., Any]

    def plan(self, abouts: Sequence[Mapping[str, Any]], armed: Armed) -> Plan | None:
        """The plan, where its checks hold.

        Args:
            abouts: the factors of a plan for the call.
            armed: the model.
        """
        walk = _walked(self.content, armed) if self.content["about"] in abouts else None
        if walk is None or not are_unchanged(self.content["files"]):
            return None

        def run(inputs: Sequence[Any]) -> Any:
            return self.program(*inputs)

        return _made(self.content, {"run": run}, walk, armed, self.frame)
