"""Rewriting of plans after changes of numbers that their code does not depend on.

Such a number is a size that the model noted in its first call, or an epoch count. A plan covers everything
that its trace might depend on, read or not. But Dynamo knows which numbers, strings and flags among a
module's attributes were read. If its guards let the plan's code run again, a new trace would give the same
code, and nothing has to be compiled.
"""

from __future__ import annotations

import json
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fxpasses.plans.errors import NoPlan, PlanFileError
from fxpasses.plans.files.plan_files import are_unchanged, read_sections, write_plan
from fxpasses.plans.walks.reads import walk_reads
from fxpasses.plans.walks.replaced import are_functions_unchanged
from fxpasses.plans.walks.walk import Walk

_ATTRIBUTE = re.compile(r"model(?:\._modules\.\w+)*\.(\w+)")
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of every module. Changes of some of them mean other hooks."""
_NUMBERS = {"int", "float", "bool", "str", "NoneType"}


class _CollectedRuns(threading.local):
    """The plan files whose compiled code ran in this thread under Dynamo's guards, while collected."""

    files: list[Path | None] | None = None


_collected = _CollectedRuns()


def note_run(file: Path | None) -> None:
    """Called when Dynamo runs the compiled graph of a plan, or with None for a graph without one."""
    if _collected.files is not None:
        _collected.files.append(file)


@contextmanager
def collect_runs() -> Iterator[list[Path | None]]:
    """Within, collect the files of the plans whose code Dynamo runs."""
    before, _collected.files = _collected.files, []
    try:
        yield _collected.files
    finally:
        _collected.files = before


@dataclass(frozen=True)
class ChangedNumbers:
    """A plan, and a model that differs from the plan's model only in numbers."""

    _content: Mapping[str, Any]
    _sections: Mapping[str, bytes]
    _story: Any

    @staticmethod
    def find(
        file: Path | None, abouts: Sequence[Mapping[str, Any]], model: Any, objects: Sequence[Any]
    ) -> ChangedNumbers | None:
        """What has changed since a plan was made, if only numbers have.

        Args:
            file: of the plan, if it has one.
            abouts: the factors of a plan for a call of the current model.
            model: the model.
            objects: those among the arguments.
        """
        if file is None or not isinstance(model, nn.Module):
            return None
        try:
            sections = dict(read_sections(file))
            content = json.loads(sections.pop("plan"))
            known = json.loads(zlib.decompress(sections.pop("story")))
            same = _without_model(content["about"])
            about = next((about for about in abouts if _without_model(about) == same), None)
            if about is None or content.get("between") or not are_unchanged(content["files"]):
                return None
            walk = Walk(keep_facts=True, leaves_open=True)
            walk.walk_call(model, objects)
            # Dynamo's code belongs to the first plan.
            first = content.get("first", file.name)
            content |= {"about": about, "read": walk_reads(walk, content["reads"]), "first": first}
        except (NoPlan, PlanFileError, OSError):
            return None  # compiling again will report the problem
        story = json.loads(json.dumps(walk.story))
        if known == story:
            return None  # it failed for another reason
        if _without_numbers(known) != _without_numbers(story) or not are_functions_unchanged(
            content["functions"]
        ):
            return None
        return ChangedNumbers(content, sections, story)

    def write(self, runs: Sequence[Path | None], folder: Callable[[Any], Path]) -> Path | None:
        """Write the plan for the current model. Returns ``None`` if it does not fit or cannot be written.

        Args:
            runs: the plans whose code Dynamo let run in a call of the model.
            folder: where plans with given factors are.
        """
        if [file and file.name for file in runs] != [self._content["first"]]:
            return None
        try:
            return write_plan(folder(self._content["about"]), self._content, self._story, self._sections)
        except OSError:
            return None


def _without_model(about: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in about.items() if name not in ("model", "objects")}


def _without_numbers(story: Sequence[Any]) -> list[Any]:
    """The walked facts without numbers in module attributes. Which attributes exist is not always guarded."""
    return [[path, None if _is_number(path, facts) else facts] for path, facts in story]


def _is_number(path: str, facts: Sequence[Any]) -> bool:
    attribute = _ATTRIBUTE.fullmatch(path) if facts[0] in _NUMBERS else None
    return attribute is not None and attribute[1] not in _OF_TORCH
