"""What happened: counts, seconds, and a record of each capture and each fallback."""

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
    """Counts since the last ``reset``. Fields can also be read by name: ``stats()["captures"]``."""

    captures: int
    """Backward passes recorded as a new graph."""
    hits: int
    """Backward passes that ran a graph recorded earlier."""
    compiles: int
    """Graphs given to a compiler."""
    fallbacks: int
    """Backward passes that ran in eager although capturing was enabled."""
    fallback_reasons: dict[str, int]
    """The same, by reason."""
    uncompiled_reasons: dict[str, int]
    """Runs of a captured graph as it is, because what the compiler made of it could not be used, by reason."""
    inlined: int
    """Compiled functions whose backward graph became part of a captured graph."""
    called_reasons: dict[str, int]
    """Compiled functions whose compiled backward is called instead, by reason: once per capture, or once per pass
    where the reason is a setting of the pass."""
    seconds: dict[str, float]
    """Time spent: ``capture`` (recording and building graphs), ``lower`` (to ATen), ``compile`` (the compiler)."""

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
    """One capture: its graph, and why no graph recorded earlier served."""

    graph: fx.GraphModule
    reason: str
    """In words: which autograd node, and what about it, is new."""
    node: str | None
    """The first autograd node that differs from the nearest earlier capture."""
    numbered_nodes: tuple[tuple[str, int], ...]
    """Names of the autograd nodes with the index that C++ gives them, in the order in which they run."""
    seconds: float
    """From the first call of the hook to the finished graph."""
    shape: Shape = dataclasses.field(repr=False)
    """What later captures are compared with."""
    inlined: tuple[str, ...] = ()
    """Autograd nodes of compiled functions whose backward graph is part of the graph."""
    called: tuple[tuple[str, str], ...] = ()
    """Autograd nodes of compiled functions whose backward stays a call, and why."""


@dataclasses.dataclass(frozen=True)
class FallbackRecord:
    """One backward pass that ran in eager, and why."""

    reason: str


class Records:
    """The captures, fallbacks and counts of the process; one lock guards all of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._counts: collections.Counter[str] = collections.Counter()
            self._fallbacks: collections.Counter[str] = collections.Counter()
            self._uncompiled: collections.Counter[str] = collections.Counter()
            self._called: collections.Counter[str] = collections.Counter()
            self._seconds = {"capture": 0.0, "lower": 0.0, "compile": 0.0}
            self.captures: collections.deque[CaptureRecord] = collections.deque(maxlen=config.keep_records)
            self.fallbacks: collections.deque[FallbackRecord] = collections.deque(maxlen=config.keep_records)

    def count(self, what: str) -> None:
        """One more of ``captures``, ``hits`` or ``compiles``."""
        with self._lock:
            self._counts[what] += 1

    def spend(self, what: str, seconds: float) -> None:
        """Time spent on ``capture``, ``lower`` or ``compile``."""
        with self._lock:
            self._seconds[what] += seconds

    def captured(self, record: CaptureRecord) -> None:
        """Enter a capture."""
        with self._lock:
            self._counts["captures"] += 1
            self._counts["inlined"] += len(record.inlined)
            self._called.update(reason for _, reason in record.called)
            self._seconds["capture"] += record.seconds
            self.captures.append(record)

    def fell_back(self, reason: str) -> FallbackRecord:
        """Enter a backward pass that ran in eager."""
        record = FallbackRecord(reason)
        with self._lock:
            self._fallbacks[reason] += 1
            self.fallbacks.append(record)
        return record

    def ran_uncompiled(self, reason: str) -> None:
        """Enter a run of a captured graph without its compiled form."""
        with self._lock:
            self._uncompiled[reason] += 1

    def kept_calls(self, reason: str, count: int) -> None:
        """Enter a run of a captured graph with calls of ``count`` compiled functions instead of their backward graphs."""
        with self._lock:
            self._called[reason] += count

    def stats(self) -> Stats:
        """The counts as they are now."""
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
