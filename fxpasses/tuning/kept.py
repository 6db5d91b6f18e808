"""What tuning found, kept on disk beside the plans: one JSON file a graph, written at once or not at all.

``tuned/FAMILY/GRAPH.json``: a family is a graph whatever its sizes are, so that another size finds what was measured for one.
Reading needs no torch.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpasses.errors import OptionsError
from fxpasses.plans.errors import PlanFileError
from fxpasses.plans.plan_files import cache_directory, check_owner, write_atomically
from fxpasses.reports.versions import LEDGER_FILE
from fxpasses.tuning.tuning_ledger import Entry

if TYPE_CHECKING:
    from fxpasses.pass_manager.pass_base import Pass  # reading needs no torch

log = logging.getLogger(__name__)

_FORMAT = 5

_KINDS: dict[str, Any] = {
    "graph": str, "steps": list, "entries": list, "surroundings": dict, "ratio": list, "memory": (int, float, type(None)), "left": list,
    "struck": str, "candidates": dict, "seconds": (int, float),
}  # fmt: skip

_VERSIONS = ("torch", "python", "fxpasses source", "device", "instruction set")
"""What differs between two ledgers that are compared."""

_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading raises of a file that holds something else."""


@dataclass(frozen=True)
class Kept:
    """The result of tuning one graph.

    Attributes:
        graph: the digest of its content.
        steps: the steps of the choice, as plain data; none for the default.
        entries: the ledger.
        surroundings: versions, device, settings: what the measurements hold for.
        ratio: time over the default's, with its interval, as numbers; empty for the default.
        memory: the same for peak memory, where it was measured.
        left: the steps that there was no time for.
        struck: why the choice is not used any more, "" if it is.
        candidates: the passes that there were to choose from, each with a digest of what it does.
        seconds: how long tuning might take: with no more than that, ``left`` is left again.
    """

    graph: str
    steps: tuple[Mapping[str, Any], ...]
    entries: tuple[Entry, ...]
    surroundings: Mapping[str, str] = field(default_factory=dict)
    ratio: tuple[float, ...] = ()
    memory: float | None = None
    left: tuple[str, ...] = ()
    struck: str = ""
    candidates: Mapping[str, str | None] = field(default_factory=dict)
    seconds: float = 0.0

    def to_data(self) -> dict[str, Any]:
        """The result as plain data."""
        return {
            "format": _FORMAT, "graph": self.graph, "steps": list(self.steps), "entries": [e.to_data() for e in self.entries],
            "surroundings": dict(self.surroundings), "ratio": list(self.ratio), "memory": self.memory, "left": list(self.left),
            "struck": self.struck, "candidates": dict(self.candidates), "seconds": self.seconds,
        }  # fmt: skip

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Kept:
        """Read what :meth:`to_data` gave. Raises: ValueError, KeyError, TypeError: it is something else."""
        if data["format"] != _FORMAT:
            raise ValueError(f"format {data['format']}")
        for name, kind in _KINDS.items():
            if not isinstance(data[name], kind):
                raise TypeError(f"{name} is {data[name]!r}")
        if not all(isinstance(step, Mapping) and isinstance(step["name"], str) for step in data["steps"]):
            raise TypeError(f"steps are {data['steps']!r}")
        if len(data["ratio"]) not in (0, 3):
            raise ValueError(f"ratio is {data['ratio']!r}")
        return cls(
            data["graph"], tuple(data["steps"]), tuple(map(Entry.from_data, data["entries"])), data["surroundings"],
            tuple(map(float, data["ratio"])), data["memory"], tuple(map(str, data["left"])), data["struck"],
            data["candidates"], float(data["seconds"]),
        )  # fmt: skip

    def covers(self, passes: Sequence[Pass]) -> bool:
        """Whether all these passes were there to choose from, as they are now."""
        return all(
            str(item) in self.candidates and self.candidates[str(item)] == item.identify().digest
            for item in passes
        )

    @property
    def situation(self) -> str:
        """What it was measured in: see :class:`~fxpasses.tuning.tuning_ledger.Entry`."""
        told = {name: value for name, value in self.surroundings.items() if name not in _VERSIONS}
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:6]
        kind = "training" if told.get("gradients enabled") == "True" else "inference"
        return f"{kind}, {told.get('threads')} threads, {told.get('goal')}, {digest}"

    def struck_for(self, graph: str, why: str) -> Kept:
        """The result with the choice struck, for its graph or for another size of it: the default is used from now on.

        Args:
            graph: the digest of the graph that it failed for.
            why: what it failed of.
        """
        measured = self.entries if graph == self.graph else ()
        entries = tuple(
            replace(e, outcome="struck", verdict=why) if e.outcome == "kept" else e for e in measured
        )
        if all(e.outcome != "struck" for e in entries):  # it was measured for another size
            told = (
                Entry(graph, step["name"], "struck", verdict=why, situation=self.situation)
                for step in self.steps
            )
            entries = (*entries, *told)
        return replace(self, graph=graph, steps=(), entries=entries, ratio=(), memory=None, struck=why)


@dataclass(frozen=True)
class Place:
    """Where the result for a graph is kept, in given surroundings.

    Attributes:
        directory: the folder of all results, or ``None`` when nothing is kept.
        graph: the digest of the graph's content.
        family: that of its content without sizes.
        surroundings: what the measurements hold for, goal and options included.
    """

    directory: Path | None
    graph: str
    family: str
    surroundings: Mapping[str, str]

    @classmethod
    def under(cls, cache: str, graph: str, family: str, surroundings: Mapping[str, str]) -> Place:
        """The place in the folder that ``cache`` names (see :func:`fxpasses.compile`).

        Args:
            cache: ``"auto"``, ``"off"`` or a folder.
            graph: the digest of the graph's content.
            family: that of its content without sizes.
            surroundings: what the measurements hold for.
        """
        root = cache_directory(cache)
        return cls(None if root is None else root / "tuned", graph, family, surroundings)

    def _folder(self) -> Path | None:
        if self.directory is None:
            return None
        told = json.dumps(dict(self.surroundings), sort_keys=True)
        return self.directory / hashlib.sha256(f"{self.family}\n{told}".encode()).hexdigest()[:32]

    @property
    def file(self) -> Path | None:
        """The file of the result for the graph itself, or ``None`` when nothing is kept."""
        folder = self._folder()
        return None if folder is None else folder / f"{self.graph}.json"

    def write(self, kept: Kept) -> None:
        """Keep a result. A disk that refuses is logged: the program is there all the same."""
        if self.file is not None:
            write_result(self.file, kept)

    def read(self) -> tuple[Kept, bool] | None:
        """The result for the graph, or for another size of it, and whether it is for these sizes."""
        folder = self._folder()
        if folder is None or not folder.is_dir():
            return None
        own = folder / f"{self.graph}.json"
        others = sorted(folder.glob("*.json"), key=lambda p: (p.stat().st_mtime, p.name), reverse=True)
        for path in (*([own] if own in others else []), *others):
            kept = read_if_whole(path)
            if kept is not None and (path == own or not kept.struck):
                return kept, path == own
        return None

    def of_known(self, known: Sequence[tuple[Place, Kept]]) -> tuple[Kept, bool] | None:
        """The same among results with their places: of a process that keeps none on disk, or cannot. Args: these."""
        about = self.family, dict(self.surroundings)
        fit = [
            (kept, place.graph == self.graph)
            for place, kept in known
            if (place.family, dict(place.surroundings)) == about
        ]
        return max(fit, key=lambda pair: pair[1], default=None)

    def gained(self) -> dict[str, float]:
        """What steps gave other graphs in the same surroundings, where they were kept: the median, time with it over time without."""
        ratios: dict[str, list[float]] = {}
        for kept in every_result(self.directory.parent) if self.directory is not None else ():
            if dict(kept.surroundings) == dict(self.surroundings):
                for entry in kept.entries:
                    if entry.outcome == "kept" and entry.ratio is not None:
                        ratios.setdefault(entry.step, []).append(entry.ratio)
        return {step: statistics.median(of) for step, of in ratios.items()}


def add_to_report(directory: str, kept: Kept) -> None:
    """Have a result among those of a report, in the place of an earlier one for the same graph."""
    path = Path(directory) / LEDGER_FILE
    try:
        before = json.loads(path.read_text()) if path.exists() else []
        others = [data for data in before if data["graph"] != kept.graph]
        write_atomically(path, json.dumps([*others, kept.to_data()]).encode())
    except (OSError, *_DAMAGE) as error:
        log.warning("the result of tuning is not in the report: %s", error)


def read_result(path: Path) -> Kept:
    """Read one file.

    Raises:
        PlanFileError: it is damaged, of another version, or others than the user may write to it.
        OSError: it cannot be read.
    """
    check_owner(path)
    try:
        return Kept.from_data(json.loads(path.read_text()))
    except _DAMAGE as error:
        raise PlanFileError(path, f"it is no result of tuning of this version: {error!r}") from error


def write_result(path: Path, kept: Kept) -> None:
    """Write one file. A disk that refuses is logged."""
    try:
        write_atomically(path, json.dumps(kept.to_data(), indent=1).encode())
    except OSError as error:
        log.warning("the result of tuning is not kept: %s", error)


def read_if_whole(path: Path) -> Kept | None:
    """What one file holds; ``None``, which is logged, where it cannot be used."""
    try:
        return read_result(path)
    except (PlanFileError, OSError) as error:
        _left_aside(str(error))
        return None


@functools.cache
def _left_aside(why: str) -> None:
    log.warning(
        "a result of tuning is left aside: %s", why
    )  # once: a graph's file is looked at several times


def every_result(directory: Path) -> Iterator[Kept]:
    """All results under a cache's directory; files that cannot be used are left out."""
    for path in sorted((directory / "tuned").glob("*/*.json")):
        kept = read_if_whole(path)
        if kept is not None:
            yield kept


def ledger_file(path: Path) -> list[Entry]:
    """The entries of a ledger that was saved with ``fxpasses ledger --json``, of that of a report, or of a cache's directory.

    Raises:
        OptionsError: it is none of these.
    """
    if path.is_dir() and not (path / LEDGER_FILE).is_file():
        return [entry for kept in every_result(path) for entry in kept.entries]
    try:
        data = json.loads((path / LEDGER_FILE if path.is_dir() else path).read_text())
        if not isinstance(data, list):
            raise TypeError(f"it is {type(data).__name__}")
        listed = (one.get("entries", [one]) for one in data)  # a report has it by graphs
        return [Entry.from_data(entry) for entries in listed for entry in entries]
    except (OSError, *_DAMAGE) as error:
        problem = f"{path} is no ledger that 'fxpasses ledger --json' printed"
        raise OptionsError("against", str(path), problem=problem) from error
