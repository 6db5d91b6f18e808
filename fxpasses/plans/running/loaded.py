"""Loading of plans, and the directory that stores them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from fxpasses.counters import counters
from fxpasses.plans import native
from fxpasses.plans.errors import NoPlan, PlanFileError
from fxpasses.plans.files.plan_files import are_unchanged, candidates, read_sections
from fxpasses.plans.graph_breaks.between import find_stubs
from fxpasses.plans.graph_breaks.frames import PYTHON, load_frame, python_frame
from fxpasses.plans.running.forward_alone import FORWARD_ALONE, ForwardAlone
from fxpasses.plans.running.plan import Plan
from fxpasses.plans.running.runtime import load_code, load_library
from fxpasses.plans.running.walked_model import WalkedModel
from fxpasses.plans.walks.replaced import are_functions_unchanged, watch_names
from fxpasses.plans.walks.walk import Walk

log = logging.getLogger(__name__)


class PlanStore(Protocol):
    """A place that stores plans."""

    def find(
        self, abouts: Sequence[Mapping[str, Any]], walked_model: WalkedModel, tensors: Sequence[torch.Tensor]
    ) -> Plan | None:
        """Find a plan for the same factors whose checks hold.

        Args:
            abouts: the factors of a plan for these sizes, and of one for many.
            walked_model: the model.
            tensors: those among the arguments.
        """

    def target(self, about: Mapping[str, Any]) -> Path | None:
        """The folder for a new plan, or None if none may be written."""

    def refuse(self, error: NoPlan) -> None:
        """Handle a call that can have no plan: return to have it compiled, or raise."""


class Directory:
    """The plans in a directory. A call without a plan is compiled, and its plan is written there."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def target(self, about: Mapping[str, Any]) -> Path:
        """The folder for a new plan."""
        return self._path / hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    def refuse(self, error: NoPlan) -> None:
        """Count the refusal."""
        counters.count_refused_plan(error.reason)
        log.info("no plan: %s", error)

    def find(
        self, abouts: Sequence[Mapping[str, Any]], walked_model: WalkedModel, tensors: Sequence[torch.Tensor]
    ) -> Plan | None:
        """Find a plan of an earlier process. Args: those of :meth:`PlanStore.find`.

        Raises:
            NoPlan: an earlier process found that there can be none.
        """
        found = (self._find(about, walked_model, tensors) for about in abouts)
        return next((plan for plan in found if plan is not None), None)

    def _find(
        self, about: Mapping[str, Any], walked_model: WalkedModel, tensors: Sequence[torch.Tensor]
    ) -> Plan | None:
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
            walk = _continue_walk(content, walked_model, path)
            if walk is None:
                continue
            if "refused" in content:
                raise NoPlan(content["refused"])
            try:
                if not are_unchanged(content["files"]):
                    continue
                plan = load_plan(content, sections, self._path, walk, walked_model, path)
                if plan.accepts(tensors):
                    return plan
            except (OSError, ImportError, PlanFileError) as error:
                log.warning("a plan is left aside: %s", error)
                counters.count_refused_plan("kernels that cannot be loaded")
        return None


def load_plan(
    content: Mapping[str, Any],
    sections: Mapping[str, bytes],
    folder: Path | None,
    walk: Walk,
    walked_model: WalkedModel,
    file: Path | None = None,
) -> Plan:
    """Load the code and kernels of a plan whose checks hold.

    Args:
        content: the plan section of its file.
        sections: the sections of its file.
        folder: where kernels are put to be loaded, or None for a temporary directory.
        walk: over the model and what the plan reads.
        walked_model: the model.
        file: the file of the plan.
    """
    if content["kind"] == PYTHON:
        # If its frame calls a graph, the graph is empty: Dynamo passes such a graph to no backend.
        no_graph = {"run": lambda inputs: (), "accepts": lambda: True}
        if "code" in sections:  # guards on numbers
            no_graph |= {"accepts": load_code(sections["code"], {}, {}, [], folder)["accepts"]}
        return _bind_plan(content, no_graph, walk, walked_model, sections.get("frame", b""), file)
    prefix = "kernel "
    if "check" in sections:
        native.use_library(lambda: load_library(native.ENTRY, sections["check"], folder))
    kernels = {n.removeprefix(prefix): data for n, data in sections.items() if n.startswith(prefix)}
    names = load_code(sections["code"], kernels, content["externs"], content["constants"], folder)
    plan = _bind_plan(content, names, walk, walked_model, sections.get("frame", b""), file)
    for checked in (walked_model, plan):
        checked.allow_view_caching(names["held_views"])
    return plan


def _continue_walk(content: Mapping[str, Any], walked_model: WalkedModel, plan: Hashable) -> Walk | None:
    """Continue the model's walk over what a plan reads. ``None`` if any of it has changed."""
    walk = walked_model.reusable_walks.continue_over_reads(
        plan, content["reads"], content["read"], walked_model.walk, walked_model.digest
    )
    is_same = (
        are_functions_unchanged(content["functions"]) and find_stubs(content.get("between", ())) is not None
    )
    return walk if is_same else None


def _bind_plan(
    content: Mapping[str, Any],
    names: Mapping[str, Any],
    walk: Walk,
    walked_model: WalkedModel,
    frame: bytes,
    file: Path | None = None,
) -> Plan:
    watch_names(walk, content["functions"])
    plan = Plan(content, names, walk, walked_model.given, walked_model.exchanged_entries, file)
    if content.get("kind") == FORWARD_ALONE:  # one for this process alone has none
        plan.forward_alone = ForwardAlone(plan, content, names["forward"], walked_model)
    if "frame" in content:
        stubs = find_stubs(content.get("between", ())) or []
        if content["frame"] is None:
            plan.frame = python_frame(walked_model.model, walked_model.functions, stubs)
        else:
            parts = walked_model.model, plan.graph, walked_model.functions, stubs, content.get("through", "")
            plan.frame = load_frame(content["frame"], frame, *parts)
    return plan


@dataclass
class Misses:
    """Calls without a plan: for which contents of the model, and how many lookups since the last hit."""

    contents: list[Any] = field(default_factory=list)
    calls: int = 0


@dataclass(frozen=True)
class InMemoryPlan:
    """A plan for this process only, of a program that cannot be serialized.

    Attributes:
        content: what its file would contain.
        frame: the code of its frame.
        program: runs its graph; takes the inputs that Dynamo's graph has.
    """

    content: Mapping[str, Any]
    frame: bytes
    program: Callable[..., Any]

    def plan(self, abouts: Sequence[Mapping[str, Any]], walked_model: WalkedModel) -> Plan | None:
        """The plan, if its checks hold.

        Args:
            abouts: the factors of a plan for the call.
            walked_model: the model.
        """
        walk = (
            _continue_walk(self.content, walked_model, id(self)) if self.content["about"] in abouts else None
        )
        if walk is None or not are_unchanged(self.content["files"]):
            return None

        def run(inputs: Sequence[Any]) -> Any:
            return self.program(*inputs)

        return _bind_plan(self.content, {"run": run}, walk, walked_model, self.frame)
