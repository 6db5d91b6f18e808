"""Tuning results on disk, beside the plans: one JSON file for each graph, written atomically.

The path is ``tuned/FAMILY/GRAPH.json``. A family is a graph regardless of its sizes, so that another size
finds what was measured for one. Reading needs no torch.
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
from fxpasses.plans.files.plan_files import cache_directory, check_owner, write_atomically
from fxpasses.reports.versions import LEDGER_FILE
from fxpasses.tuning.tuning_ledger import Entry

if TYPE_CHECKING:
    from fxpasses.pass_manager.pass_base import Pass  # reading needs no torch

log = logging.getLogger(__name__)

_FORMAT = 5

_FIELD_TYPES: dict[str, Any] = {
    "graph": str, "steps": list, "entries": list, "surroundings": dict, "ratio": list, "memory": (int, float, type(None)), "left": list,
    "struck": str, "candidates": dict, "seconds": (int, float),
}  # fmt: skip

_VERSION_KEYS = ("torch", "python", "fxpasses source", "device", "instruction set")
"""What may differ between two ledgers that are compared."""

_READ_ERRORS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading raises if a file has other contents."""


@dataclass(frozen=True)
class TuningResult:
    """The result of tuning one graph.

    Attributes:
        graph: the digest of its content.
        steps: the steps of the choice, as plain data; empty for the default.
        entries: the ledger.
        surroundings: the versions, device and settings that the measurements hold for.
        ratio: the time over the default's, with its interval, as numbers; empty for the default.
        memory: the same for peak memory, if it was measured.
        left: the steps that there was no time for.
        struck: why the choice is no longer used; "" if it is.
        candidates: the passes that were available to choose from, each with a digest of what it does.
        seconds: the time limit of the tuning. A run with no more time would leave ``left`` again.
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
        """Return the result as plain data."""
        return {
            "format": _FORMAT, "graph": self.graph, "steps": list(self.steps), "entries": [e.to_data() for e in self.entries],
            "surroundings": dict(self.surroundings), "ratio": list(self.ratio), "memory": self.memory, "left": list(self.left),
            "struck": self.struck, "candidates": dict(self.candidates), "seconds": self.seconds,
        }  # fmt: skip

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> TuningResult:
        """Read what :meth:`to_data` gave. Raises: ValueError, KeyError, TypeError: it is something else."""
        if data["format"] != _FORMAT:
            raise ValueError(f"format {data['format']}")
        for name, kind in _FIELD_TYPES.items():
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
        """Whether all these passes were candidates, in their current version."""
        return all(
            str(item) in self.candidates and self.candidates[str(item)] == item.identify().digest
            for item in passes
        )

    @property
    def situation(self) -> str:
        """The conditions of the measurement: see :class:`~fxpasses.tuning.tuning_ledger.Entry`."""
        conditions = {name: value for name, value in self.surroundings.items() if name not in _VERSION_KEYS}
        digest = hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:6]
        kind = "training" if conditions.get("gradients enabled") == "True" else "inference"
        return f"{kind}, {conditions.get('threads')} threads, {conditions.get('goal')}, {digest}"

    def struck_for(self, graph: str, why: str) -> TuningResult:
        """Return the result with its choice struck, so that the default is used from now on.

        Args:
            graph: the digest of the graph that it failed for: its own, or one of another size.
            why: the reason for the failure.
        """
        measured = self.entries if graph == self.graph else ()
        entries = tuple(
            replace(e, outcome="struck", verdict=why) if e.outcome == "kept" else e for e in measured
        )
        if all(e.outcome != "struck" for e in entries):  # measured for another size
            struck_entries = (
                Entry(graph, step["name"], "struck", verdict=why, situation=self.situation)
                for step in self.steps
            )
            entries = (*entries, *struck_entries)
        return replace(self, graph=graph, steps=(), entries=entries, ratio=(), memory=None, struck=why)


@dataclass(frozen=True)
class ResultLocation:
    """Where the result for a graph is kept, for given surroundings.

    Attributes:
        directory: the folder of all results, or ``None`` if nothing is kept.
        graph: the digest of the graph's content.
        family: the digest of its content without sizes.
        surroundings: what the measurements hold for, goal and options included.
    """

    directory: Path | None
    graph: str
    family: str
    surroundings: Mapping[str, str]

    @classmethod
    def in_cache(cls, cache: str, graph: str, family: str, surroundings: Mapping[str, str]) -> ResultLocation:
        """Return the location in the folder that ``cache`` names (see :func:`fxpasses.compile`).

        Args:
            cache: ``"auto"``, ``"off"`` or a folder.
            graph: the digest of the graph's content.
            family: the digest of its content without sizes.
            surroundings: what the measurements hold for.
        """
        root = cache_directory(cache)
        return cls(None if root is None else root / "tuned", graph, family, surroundings)

    def _folder(self) -> Path | None:
        if self.directory is None:
            return None
        text = json.dumps(dict(self.surroundings), sort_keys=True)
        return self.directory / hashlib.sha256(f"{self.family}\n{text}".encode()).hexdigest()[:32]

    @property
    def file(self) -> Path | None:
        """The file with the result for this graph, or ``None`` if nothing is kept."""
        folder = self._folder()
        return None if folder is None else folder / f"{self.graph}.json"

    def write(self, result: TuningResult) -> None:
        """Write a result. A write error is only logged, because the program works without the file."""
        if self.file is not None:
            write_result(self.file, result)

    def read(self) -> tuple[TuningResult, bool] | None:
        """Return the result for the graph, or for another size of it, and whether it is for these sizes."""
        folder = self._folder()
        if folder is None or not folder.is_dir():
            return None
        own = folder / f"{self.graph}.json"
        others = sorted(folder.glob("*.json"), key=lambda p: (p.stat().st_mtime, p.name), reverse=True)
        for path in (*([own] if own in others else []), *others):
            result = read_if_valid(path)
            if result is not None and (path == own or not result.struck):
                return result, path == own
        return None

    def find_in_memory(
        self, known: Sequence[tuple[ResultLocation, TuningResult]]
    ) -> tuple[TuningResult, bool] | None:
        """Like :meth:`read`, for a process that keeps no results on disk, or cannot.

        Args:
            known: results in memory, with their locations.
        """
        identity = self.family, dict(self.surroundings)
        matching = [
            (result, location.graph == self.graph)
            for location, result in known
            if (location.family, dict(location.surroundings)) == identity
        ]
        return max(matching, key=lambda pair: pair[1], default=None)

    def median_ratios(self) -> dict[str, float]:
        """Return the median ratio of each step that was kept for other graphs in the same surroundings.

        A ratio is the time with the step over the time without.
        """
        ratios: dict[str, list[float]] = {}
        for result in iter_results(self.directory.parent) if self.directory is not None else ():
            if dict(result.surroundings) == dict(self.surroundings):
                for entry in result.entries:
                    if entry.outcome == "kept" and entry.ratio is not None:
                        ratios.setdefault(entry.step, []).append(entry.ratio)
        return {step: statistics.median(values) for step, values in ratios.items()}


def add_to_report(directory: str, result: TuningResult) -> None:
    """Add a result to those of a report, replacing an earlier one for the same graph."""
    path = Path(directory) / LEDGER_FILE
    try:
        before = json.loads(path.read_text()) if path.exists() else []
        others = [data for data in before if data["graph"] != result.graph]
        write_atomically(path, json.dumps([*others, result.to_data()]).encode())
    except (OSError, *_READ_ERRORS) as error:
        log.warning("the result of tuning is not in the report: %s", error)


def read_result(path: Path) -> TuningResult:
    """Read one file.

    Raises:
        PlanFileError: the file is damaged, of another version, or writable by others than the user.
        OSError: the file cannot be read.
    """
    check_owner(path)
    try:
        return TuningResult.from_data(json.loads(path.read_text()))
    except _READ_ERRORS as error:
        raise PlanFileError(path, f"it is no result of tuning of this version: {error!r}") from error


def write_result(path: Path, result: TuningResult) -> None:
    """Write one file. A write error is only logged."""
    try:
        write_atomically(path, json.dumps(result.to_data(), indent=1).encode())
    except OSError as error:
        log.warning("the result of tuning is not kept: %s", error)


def read_if_valid(path: Path) -> TuningResult | None:
    """Return the contents of one file, or ``None`` if it cannot be used, which is logged."""
    try:
        return read_result(path)
    except (PlanFileError, OSError) as error:
        _warn_unusable(str(error))
        return None


@functools.cache
def _warn_unusable(why: str) -> None:
    log.warning(
        "a result of tuning is left aside: %s", why
    )  # log once: the file of a graph is read several times


def iter_results(directory: Path) -> Iterator[TuningResult]:
    """Iterate over all results under a cache directory, skipping files that cannot be used."""
    for path in sorted((directory / "tuned").glob("*/*.json")):
        result = read_if_valid(path)
        if result is not None:
            yield result


def read_ledger(path: Path) -> list[Entry]:
    """Read the entries of a ledger: of ``fxpasses ledger --json``, of a report, or of a cache directory.

    Raises:
        OptionsError: ``path`` is none of these.
    """
    if path.is_dir() and not (path / LEDGER_FILE).is_file():
        return [entry for result in iter_results(path) for entry in result.entries]
    try:
        data = json.loads((path / LEDGER_FILE if path.is_dir() else path).read_text())
        if not isinstance(data, list):
            raise TypeError(f"it is {type(data).__name__}")
        groups = (one.get("entries", [one]) for one in data)  # a report groups entries by graph
        return [Entry.from_data(entry) for entries in groups for entry in entries]
    except (OSError, *_READ_ERRORS) as error:
        problem = f"{path} is no ledger that 'fxpasses ledger --json' printed"
        if isinstance(error, OSError):
            problem = f"{path} cannot be read: {error.strerror}"
        raise OptionsError("against", str(path), problem=problem) from error
