"""``fxpasses.save`` and ``fxpasses.load``: plans in one file, to take to another directory, process or
machine.

The other machine has to be of the same kind.
"""

from __future__ import annotations

import json
import os
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from fake.wrong_arguments import is_path
from fxpasses.errors import OptionsError
from fxpasses.plans._torch import planned_call
from fxpasses.plans.compile import Compiled
from fxpasses.plans.errors import NoPlan, PlanFileError, PlanMismatchError
from fxpasses.plans.files.archive import Archive, read_archive, write_archive
from fxpasses.plans.files.plan_files import comes_last, read_sections
from fxpasses.plans.graph_breaks.between import find_stubs
from fxpasses.plans.inputs.arguments import ARGUMENT_FACTS, argument_difference
from fxpasses.plans.inputs.surroundings import surroundings
from fxpasses.plans.running.forward_alone import write_deferred_plans
from fxpasses.plans.running.loaded import load_plan
from fxpasses.plans.running.plan import Plan
from fxpasses.plans.running.walked_model import WalkedModel
from fxpasses.plans.tensors.tensor_facts import TENSOR_FACTS
from fxpasses.plans.walks.reads import walk_reads
from fxpasses.plans.walks.replaced import are_functions_unchanged
from fxpasses.plans.walks.walk import Walk

M = TypeVar("M")
Story = list[list[Any]]


def save(
    compiled: Callable[..., Any],
    path: str | os.PathLike[str],
    *,
    private_key: str | os.PathLike[str] | bytes | None = None,
) -> None:
    """Save what was compiled in one file, for :func:`load`.

    The file has the plans that this object has written or used so far: one for each kind of call (sizes,
    training or not). Make a call of each kind first; for training, include the backward pass. If calls had no
    plan, a warning says why, and the file lacks them.

    Args:
        compiled: what :func:`fxpasses.compile` returned, or ``torch.compile`` for this backend.
        path: the file, by convention ``name.fxp``.
        private_key: a file with an Ed25519 key in PEM, or its bytes, to sign the file with.

    Raises:
        OptionsError: ``compiled`` is something else, has no plan (the message says why), or comes from
            :func:`load`.
        PlanFileError: a plan in the cache is gone or damaged, or the key cannot be used.
        OSError: the file cannot be written. An existing file is left in place.
    """
    compiled = planned_call(compiled)
    if not isinstance(compiled, Compiled):
        raise OptionsError(
            "compiled", compiled, 'what fxpasses.compile, or torch.compile(backend="fxpasses"), returned'
        )
    target = _path("path", path)
    if isinstance(compiled._plan_store, _ArchivedPlans):
        loaded_from = str(compiled._plan_store.path)
        raise OptionsError(
            "compiled", compiled, problem=f"it was loaded from {loaded_from!r}: copy that file"
        )
    write_deferred_plans()
    files = [file for file in compiled.plan_files if file.exists() or not comes_last(file)]
    if not files:
        why = compiled.why_no_plan or "it was not called yet (for training, backward pass included)"
        raise OptionsError("compiled", compiled, problem=f"there is no plan to save: {why}")
    plans = [read_sections(file) for file in files]
    contents = [json.loads(plan["plan"]) for plan in plans]
    made_by = contents[0]["about"]["surroundings"]
    if changed := {n for c in contents for n, _ in c["about"]["surroundings"].items() ^ made_by.items()}:
        raise OptionsError(
            "compiled",
            compiled,
            problem=f"changed between its plans: {', '.join(sorted(changed))}; save it in between",
        )
    entries = [_manifest_entry(content) for content in contents]
    kind = type(compiled.model) if not hasattr(compiled.model, "__qualname__") else compiled.model
    manifest = {"model": f"{kind.__module__}.{kind.__qualname__}", "made by": made_by, "plans": entries}
    write_archive(target, manifest, plans, private_key)
    if any(comes_last(file) for file in files):
        warnings.warn(
            f"fxpasses.save: of calls with gradients on, {target.name} has the forward pass alone: no backward pass was run, "
            "and gradients are computed in eager. Run one before, or call the model in torch.no_grad()",
            stacklevel=2,
        )
    if compiled.reasons_for_none:
        why = "; ".join(compiled.reasons_for_none)
        warnings.warn(f"fxpasses.save: calls that had no plan are not in {target.name}: {why}", stacklevel=2)


def load(
    path: str | os.PathLike[str],
    model: M,
    *,
    trust: bool = False,
    public_key: str | os.PathLike[str] | bytes | None = None,
) -> Compiled[Any]:
    """Load what :func:`save` wrote, for a model of the same kind. Imports neither Dynamo nor Inductor.

    The file contains code that runs in this process. It runs only with ``trust=True``, or if the file was
    signed with the private key of ``public_key``. The signature and all checksums are verified first.

    Args:
        path: the file.
        model: a model like the saved one: the same classes, attributes and metadata of weights. Values may
            differ.
        trust: the file comes from somebody who may run code here.
        public_key: a file with an Ed25519 key in PEM, or its bytes.

    Returns:
        A callable like the one that was saved. A call without a plan raises a :class:`PlanMismatchError`.

    Raises:
        PlanFileError: the file is damaged, not trusted, or of another format.
        PlanMismatchError: the machine, versions, settings or model differ; it names the difference.
        OptionsError: ``model`` is not callable, or ``path`` or ``trust`` is not valid.
        OSError: the file cannot be read.
    """
    if not callable(model):
        raise OptionsError("model", model, "a module or function")
    if type(trust) is not bool:
        raise OptionsError("trust", trust, "True or False")
    file = _path("path", path)
    if not trust and public_key is None:
        raise PlanFileError(
            file,
            "it has code that would run here: load it with trust=True if you know who made it, or with the public_key of who signed it",
        )
    saved = _ArchivedPlans(read_archive(file, public_key))
    compiled = Compiled(model, {}, saved, dynamic=None, fullgraph=False)
    try:
        walk = Walk(leaves_open=True)
        saved.check(walk.add("model", model), model)
    except NoPlan as error:
        saved.refuse(error)
    return compiled


def _path(name: str, given: Any) -> Path:
    if not is_path(given):
        raise OptionsError(name, given, "a file")
    return Path(given)


def _manifest_entry(content: Mapping[str, Any]) -> dict[str, Any]:
    about = content["about"]
    args, kwargs = about["arguments"]
    described = {f"argument {i}": value for i, value in enumerate(args)} | {
        f"argument {name}": value for name, value in kwargs
    }
    return {
        "kind": {"inference": "inference", "forward": "training"}.get(content["kind"], content["kind"]),
        "arguments": {name: _readable(value) for name, value in described.items()},
        "state": about["state"],
        "options": {**about["options"], "dynamic": about["dynamic"], "fullgraph": about["fullgraph"]},
        "reads": [".".join(read) for read in content["reads"]],
    }


def _readable(value: Any) -> Any:
    if value[0] == "tensor":
        facts = dict(zip(ARGUMENT_FACTS, value[1:], strict=True))
        return f"{facts['dtype']} {facts['sizes']}, strides {facts['strides']}{', requires a gradient' if facts['requires_grad'] else ''}"
    return [value[0], *value[1:]]


class _ArchivedPlans:
    """The plans of one file."""

    def __init__(self, archive: Archive) -> None:
        self.path = archive.path
        try:
            self._plans = [(json.loads(sections["plan"]), sections) for sections in archive.plans]
        except ValueError as error:
            raise PlanFileError(archive.path, f"a plan in it is no JSON: {error}") from None

    def target(self, about: Mapping[str, Any]) -> None:
        """Always None: nothing is compiled."""

    def refuse(self, error: NoPlan) -> None:
        """Raise, since there is nothing to fall back to."""
        where = f" ({error.where})" if error.where else ""
        raise PlanMismatchError(self.path, f"{error.reason}{where}", "no", "yes") from None

    def check(self, digest: str, model: Any) -> None:
        """Check that the machine and the model match.

        Raises:
            PlanMismatchError: they do not.
        """
        contents = [content for content, _ in self._plans]
        self._check_same(contents[0]["about"]["surroundings"], surroundings())
        if all(content["about"]["model"] != digest for content in contents):
            walk = Walk(keep_facts=True, leaves_open=True)
            walk.add("model", model)
            story = _facts_below(walk, "model")
            known = [_saved_facts_below(sections, "model") for _, sections in self._plans]
            nearest = min(known, key=lambda saved: len({*map(repr, saved)} ^ {*map(repr, story)}))
            raise PlanMismatchError(self.path, *_first_difference(nearest, story))

    def find(
        self, abouts: Sequence[Mapping[str, Any]], walked_model: WalkedModel, tensors: Sequence[torch.Tensor]
    ) -> Plan:
        """Find a plan for the same factors whose checks hold.

        Args:
            abouts: the factors of a plan for these sizes, and of one for many.
            walked_model: the model.
            tensors: those among the arguments.

        Raises:
            PlanMismatchError: there is none; it names the difference.
        """
        about = abouts[0]
        self.check(about["model"], walked_model.model)
        refused, other = False, None
        for content, sections in self._plans:
            if not all(_distance(content["about"], wanted) for wanted in abouts):
                walk = walked_model.walk.fork()
                if walk_reads(walk, content["reads"], content["read"]) != content["read"]:
                    other = other or (content, sections)
                    continue
                if not are_functions_unchanged(content["functions"]):
                    raise PlanMismatchError(self.path, "functions of torch", "torch's own", "others")
                if find_stubs(content.get("between", ())) is None:
                    raise PlanMismatchError(self.path, "functions between its graphs", "there", "absent")
                plan = load_plan(content, sections, None, walk, walked_model, self.path)
                if plan.accepts(tensors):
                    return plan
                refused = True
        if other is not None:
            self._raise_read_difference(*other, walked_model)
        if refused:
            sizes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise PlanMismatchError(self.path, "sizes of arguments", "others", sizes)
        was = min((content["about"] for content, _ in self._plans), key=lambda saved: _distance(saved, about))
        self._check_same(was["state"], about["state"])
        if was["arguments"] != about["arguments"]:
            raise PlanMismatchError(self.path, *argument_difference(was["arguments"], about["arguments"]))
        raise PlanMismatchError(self.path, "the content of the model", was["model"], about["model"])

    def _check_same(self, saved: Mapping[str, str], found: Mapping[str, str]) -> None:
        for name in sorted({*saved, *found}, key=lambda name: name == "processor"):
            if saved.get(name) != found.get(name):
                raise PlanMismatchError(
                    self.path, name, *(_setting_text(facts.get(name)) for facts in (saved, found))
                )

    def _raise_read_difference(
        self, content: Mapping[str, Any], sections: Mapping[str, bytes], walked_model: WalkedModel
    ) -> None:
        walk = Walk(keep_facts=True, leaves_open=True)
        walk.add("model", walked_model.model)
        walk_reads(walk, content["reads"])
        for name in ("model", *map(".".join, content["reads"])):
            was, now = _saved_facts_below(sections, name), _facts_below(walk, name)
            if was != now:
                raise PlanMismatchError(self.path, *_first_difference(was, now))
        raise PlanMismatchError(self.path, "what its code reads", "something else", "this")


def _facts_below(walk: Walk, name: str) -> Story:
    """The facts of a walk below one name, as JSON."""
    return json.loads(
        json.dumps([[path, facts] for path, facts in walk.story or () if _is_below(path, name)])
    )  # type: ignore[no-any-return]


def _saved_facts_below(sections: Mapping[str, bytes], name: str) -> Story:
    return [
        [path, facts]
        for path, facts in json.loads(zlib.decompress(sections["story"]))
        if _is_below(path, name)
    ]


def _is_below(path: str, name: str) -> bool:
    return path.startswith(name) and path[len(name) : len(name) + 1] in ("", ".", "[", "{")


def _distance(saved: Mapping[str, Any], now: Mapping[str, Any]) -> int:
    state = sum(saved["state"].get(name) != value for name, value in now["state"].items())
    return (
        state
        + (saved["arguments"] != now["arguments"])
        + 100 * ([saved["model"], saved["objects"]] != [now["model"], now["objects"]])
    )


def _first_difference(saved: Story, now: Story) -> tuple[str, str, str]:
    """The first difference between two walks: the place, and what each met there."""
    index = next(
        (i for i, (was, found) in enumerate(zip(saved, now, strict=False)) if was != found),
        min(len(saved), len(now)),
    )
    paths, paths_now = {path for path, _ in saved}, {path for path, _ in now}
    for path, _ in now[index:]:
        if path not in paths:
            return _readable_path(path), "absent", "there"
    for path, _ in saved[index:]:
        if path not in paths_now:
            return _readable_path(path), "there", "absent"
    if index == min(len(saved), len(now)):
        return "the content of the model", f"{len(saved)} facts", f"{len(now)} facts"
    (path, was), (_, found) = saved[index], now[index]
    if was[0] == found[0] == "tensor":
        for fact, a, b in zip(("order", "memory", *TENSOR_FACTS), was[1:], found[1:], strict=True):
            if a != b:
                return f"{fact} of {_readable_path(path)}", str(a), str(b)
    if was[0] == found[0] == "function":
        return f"code of {_readable_path(path)}", was[-1][:12], found[-1][:12]
    return _readable_path(path), " ".join(map(str, was)), " ".join(map(str, found))


def _readable_path(path: str) -> str:
    for step in ("._modules", "._parameters", "._buffers"):
        path = path.replace(step, "")
    return path


def _setting_text(value: str | None) -> str:
    return "not set" if value is None else value or "empty"
