"""Statistics: counts, seconds, and a record of each capture and each fallback."""

import collections
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

from torch import fx

from compiled_autograd.capture.cache_misses import Shape
from compiled_autograd.config import config


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts since the last ``reset``. Fields can also be read by key: ``stats()["captures"]``."""

    captures: int
    """Backward passes captured as a new graph."""
    hits: int
    """Backward passes that ran a graph captured earlier."""
    compiles: int
    """Graphs passed to a compiler."""
    fallbacks: int
    """Backward passes that ran in eager while capturing was enabled."""
    fallback_reasons: dict[str, int]
    """Fallbacks by reason."""
    uncompiled_reasons: dict[str, int]
    """Runs of a captured graph uncompiled, because its compiled form could not be used, by reason."""
    inlined: int
    """Compiled functions whose backward graph was inlined into a captured graph."""
    called_reasons: dict[str, int]
    """Compiled functions whose compiled backward is called instead, by reason: counted once per capture, or
    once per pass if the reason is a setting of the pass."""
    seconds: dict[str, float]
    """Seconds in ``capture`` (recording, building graphs), ``lower`` (to ATen) and ``compile`` (compiler)."""

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    def keys(self) -> list[str]:
        return [field.name for field in dataclasses.fields(self)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())


@dataclasses.dataclass(frozen=True)
class CaptureRecord:
    """One capture: its graph, and why no earlier graph could be reused."""

    graph: fx.GraphModule
    reason: str
    """A description of which autograd node differs, and how."""
    node: str | None
    """The first autograd node that differs from the nearest earlier capture."""
    numbered_nodes: tuple[tuple[str, int], ...]
    """Names of the autograd nodes with the index that C++ gives them, in execution order."""
    seconds: float
    """Time from the first call of the hook to the finished graph."""
    shape: Shape = dataclasses.field(repr=False)
    """What later captures are compared with."""
    inlined: tuple[str, ...] = ()
    """Autograd nodes of compiled functions whose backward graph was inlined."""
    called: tuple[tuple[str, str], ...] = ()
    """Autograd nodes of compiled functions whose backward remains a call, and why."""


@dataclasses.dataclass(frozen=True)
class FallbackRecord:
    """One backward pass that ran in eager, and why."""

    reason: str


class Records:
    """Captures, fallbacks and counts of this process, guarded by one lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Clear everything."""
        with self._lock:
            self._counts: collections.Counter[str] = collections.Counter()
            self._fallbacks: collections.Counter[str] = collections.Counter()
            self._uncompiled: collections.Counter[str] = collections.Counter()
            self._called: collections.Counter[str] = collections.Counter()
            self._seconds = {"capture": 0.0, "lower": 0.0, "compile": 0.0}
            self.captures: collections.deque[CaptureRecord] = collections.deque(maxlen=config.keep_records)
            self.fallbacks: collections.deque[FallbackRecord] = collections.deque(maxlen=config.keep_records)

    def count(self, what: str) -> None:
        """Increment the count of ``captures``, ``hits`` or ``compiles``."""
        with self._lock:
            self._counts[what] += 1

    def add_seconds(self, what: str, seconds: float) -> None:
        """Add time spent on ``capture``, ``lower`` or ``compile``."""
        with self._lock:
            self._seconds[what] += seconds

    def captured(self, record: CaptureRecord) -> None:
        """Record a capture."""
        with self._lock:
            self._counts["captures"] += 1
            self._counts["inlined"] += len(record.inlined)
            self._called.update(reason for _, reason in record.called)
            self._seconds["capture"] += record.seconds
            self.captures.append(record)

    def fell_back(self, reason: str) -> FallbackRecord:
        """Record a backward pass that ran in eager."""
        record = FallbackRecord(reason)
        with self._lock:
            self._fallbacks[reason] += 1
            self.fallbacks.append(record)
        return record

    def ran_uncompiled(self, reason: str) -> None:
        """Record that a captured graph ran uncompiled."""
        with self._lock:
            self._uncompiled[reason] += 1

    def add_called(self, reason: str, count: int) -> None:
        """Record a run of a captured graph with calls of ``count`` compiled backwards, not inlined."""
        with self._lock:
            self._called[reason] += count

    def stats(self) -> Stats:
        """Return the current counts."""
        with self._lock:
            return Stats(
                captures=self._counts["captures"],
                hits=self._counts["hits"],
                compiles=self._counts["compiles"],
                fallbacks=self._fallbacks.total(),
                fallback_reasons=dict(self._fallbacks),
                uncompiled_reasons=dict(self._uncompiled),
                inlined=self._counts["inlined"],
                called_reasons=dict(self._called),
                seconds=dict(self._seconds),
            )
