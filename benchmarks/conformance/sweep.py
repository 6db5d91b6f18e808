"""Run each subject in eager and in the engine under test, and compare step by step."""

from __future__ import annotations

import difflib
import fnmatch
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benchmarks.conformance.compare import Outcome, Verdict, compare, of_error
from benchmarks.conformance.engines import ENGINES, active, make_mode, to_fake
from benchmarks.conformance.errors import ConformanceOptionsError
from benchmarks.conformance.layouts import LAYOUTS
from benchmarks.conformance.observe import Observation, observe
from benchmarks.conformance.report import Case, Tally
from benchmarks.conformance.subjects import Subject, entry_name, names, seed, subjects

__all__ = ["DATABASES", "TABLES", "Options", "sweep"]

TABLES = ("forward", "backward", "in-place", "out")
DATABASES = ("op", "custom", "module")


@dataclass(frozen=True)
class Options:
    """Options of a sweep. All choices are deterministic: the same options give the same cases.

    Raises:
        ConformanceOptionsError: an option names something unknown, or would select nothing.
    """

    #: "torch", "rules" or "fake".
    engine: str = "rules"
    #: Mark all dimensions dynamic.
    symbolic: bool = False
    tables: Sequence[str] = TABLES
    layouts: Sequence[str] = ("given",)
    dtypes: Sequence[torch.dtype] = (torch.float32,)
    #: Shell patterns for the names of entries; all entries if empty.
    patterns: Sequence[str] = ()
    #: Databases: "op", "custom", "module".
    databases: Sequence[str] = DATABASES
    #: Maximum samples per entry, evenly spread; 0 for all.
    samples: int = 8
    #: Every ``count``-th entry, starting at ``index``.
    shard: tuple[int, int] = (0, 1)
    #: Run the fake side this many times and judge the last run: with 2, the engine's cached answer.
    repeat: int = 1
    #: Device of the tensors: "cpu" or "cuda".
    device: str = "cpu"

    def __post_init__(self) -> None:
        _check_names("engine", [self.engine], ENGINES)
        _check_names("tables", self.tables, TABLES)
        _check_names("layouts", self.layouts, tuple(LAYOUTS))
        _check_names("databases", self.databases, DATABASES)
        _check_names("device", [self.device], ("cpu", "cuda"))
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConformanceOptionsError(
                "device: torch finds no CUDA device here, and eager has to run on it", argument="device"
            )
        for dtype in self.dtypes:
            if not isinstance(dtype, torch.dtype):
                raise ConformanceOptionsError(f"dtypes: {dtype!r} is not a torch.dtype", argument="dtypes")
        if not self.dtypes:
            raise ConformanceOptionsError("dtypes: name at least one", argument="dtypes")
        index, count = self.shard
        if not 0 <= index < count:
            raise ConformanceOptionsError(
                f"shard: {index}/{count} is no part of the whole: INDEX/COUNT with 0 <= INDEX < COUNT",
                argument="shard",
            )
        for name, value, least in (("samples", self.samples, 0), ("repeat", self.repeat, 1)):
            if value < least:
                raise ConformanceOptionsError(f"{name}: {value} is less than {least}", argument=name)

    def entries(self) -> list[tuple[str, Any]]:
        """Return the database entries that these options select.

        Raises:
            ConformanceOptionsError: a pattern matches no entry, or nothing is selected.
        """
        index, count = self.shard
        known = [entry_name(entry) for database, entry in names() if database in self.databases]
        for pattern in self.patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in known):
                near = difflib.get_close_matches(pattern, known, n=3)
                hint = f"; did you mean {', '.join(near)}?" if near else ""
                raise ConformanceOptionsError(
                    f"patterns: {pattern!r} matches no entry of the databases {', '.join(self.databases)}{hint}",
                    argument="patterns",
                )
        selected = [
            (database, entry)
            for database, entry in names()
            if database in self.databases
            and (not self.patterns or any(fnmatch.fnmatchcase(entry_name(entry), p) for p in self.patterns))
        ]
        if not selected[index::count]:
            raise ConformanceOptionsError(
                f"shard: {index}/{count} of {len(selected)} entries holds none", argument="shard"
            )
        return selected[index::count]


def _check_names(option: str, given: Sequence[str], allowed: Sequence[str]) -> None:
    if not given:
        raise ConformanceOptionsError(f"{option}: name at least one of {', '.join(allowed)}", argument=option)
    for name in given:
        if name not in allowed:
            near = difflib.get_close_matches(str(name), allowed, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConformanceOptionsError(
                f"{option}: {name!r} is not one of {', '.join(allowed)}{hint}", argument=option
            )


def sweep(options: Options, progress: Callable[[str], None] = lambda name: None) -> Tally:
    """Run the selected cases and count the verdicts."""
    tally = Tally()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for database, entry in options.entries():
            progress(entry_name(entry))
            chosen = subjects(
                database,
                entry,
                layouts=options.layouts,
                tables=options.tables,
                samples=options.samples,
                dtypes=options.dtypes,
                device=options.device,
            )
            for subject in chosen:
                for table, outcome in _judge(subject, options):
                    tally.add(Case(subject.label, table, subject.layout, options.symbolic, outcome))
    return tally


def _judge(subject: Subject, options: Options) -> Iterator[tuple[str, Outcome]]:
    """Yield the outcome of every step that eager completes."""
    seed()
    inputs = subject.inputs()
    expected, _ = _observe_run(subject, inputs)
    if not expected:
        return
    seen: list[tuple[str, Observation]] = []
    error: Exception | None = None
    for _ in range(options.repeat):
        seed()
        mode = make_mode(options.engine, symbolic=options.symbolic)
        try:
            inputs = to_fake(mode, subject.inputs())
        except Exception as failure:  # noqa: BLE001 - any failure of the engine is a finding
            seen, error = [], failure
            continue
        with active(mode):
            seen, error = _observe_run(subject, inputs)
    for step, (table, observation) in enumerate(expected):
        if step < len(seen):
            outcome = compare(observation, seen[step][1])
            if outcome.verdict is Verdict.MISMATCH and _depends_on_values(subject, step, seen[step][1]):
                outcome = Outcome(Verdict.DATA_DEPENDENT, f"right for other values; {outcome.detail}")
            yield table, outcome
        elif step == len(seen) and error is not None:
            yield table, of_error(error)
        else:
            break


def _depends_on_values(subject: Subject, step: int, actual: Observation) -> bool:
    """Return whether eager gives the engine's result for other input values: all ones or all zeros."""
    for value in (1, 0):
        seed()
        inputs = subject.inputs()
        for tensor in pytree.tree_leaves(inputs):
            if isinstance(tensor, torch.Tensor) and _holds_any_number(tensor):
                tensor.detach().fill_(value)
        expected, _ = _observe_run(subject, inputs)
        if step < len(expected) and compare(expected[step][1], actual).verdict is not Verdict.MISMATCH:
            return True
    return False


def _holds_any_number(tensor: torch.Tensor) -> bool:
    """Return whether any values are valid for a tensor: integers may be indices."""
    return tensor.layout is torch.strided and (tensor.is_floating_point() or tensor.is_complex())


def _observe_run(subject: Subject, inputs: Any) -> tuple[list[tuple[str, Observation]], Exception | None]:
    """Run to the end or to the first exception. Return the observations and the exception."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    seen: list[tuple[str, Observation]] = []
    try:
        for table, results in subject.run(inputs):
            seen.append((table, observe(results, tensors)))
    except Exception as error:  # noqa: BLE001 - samples that eager refuses are skipped, engine errors are findings
        return seen, error
    return seen, None


def is_finding(outcome: Outcome) -> bool:
    """Return whether a correct engine never gives this outcome."""
    return outcome.verdict in (Verdict.MISMATCH, Verdict.UNSUPPORTED, Verdict.ERROR)
