"""Limits of a compilation: the switches that a bisection for the wrong stage, pass, site or lowering turns.

``fxpasses bisect`` starts processes that read them, as JSON, from the environment variable
``FXPASSES_LIMITS``. Nothing else sets it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from torch import fx

from fxpasses.graphs.rewriting import copy_graph
from fxpasses.pass_manager.pass_base import FunctionPass, Pass
from fxpasses.pass_manager.sites import collect_sites

VARIABLE = "FXPASSES_LIMITS"
Stage = Literal["eager", "capture", "partition", "passes", "inductor"]
"""``eager``: Dynamo's graph, unchanged. ``capture``: AOTAutograd's graphs, split by torch's partition.
``partition``: split by ours. ``passes``: with passes, operator by operator. ``inductor``: everything,
compiled as the options say."""


@dataclass(frozen=True)
class Limits:
    """The stage, pass or site at which a compilation ends.

    Attributes:
        stage: the last stage that runs.
        passes: how many passes run, from the first; ``None`` for all of them.
        sites: how many match sites the last of these passes may rewrite, over all graphs. A pass that claims
            no sites counts one per graph.
        lowerings: how many operators Inductor lowers itself, over all graphs. The others are called
            unlowered.
        check: whether each pass is checked by value; at stage ``inductor``, whether Inductor's result for
            each graph is.
        suspect: the node whose lowering is at fault, if known.
        record: a file for the stages, passes and sites that the compilation met.
    """

    stage: Stage = "inductor"
    passes: int | None = None
    sites: int | None = None
    lowerings: int | None = None
    check: bool = False
    suspect: str = ""
    record: str | None = None

    def to_json(self) -> str:
        """The limits that differ from their defaults, as text for the environment variable."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return json.dumps({k: v for k, v in values.items() if v != Limits.__dataclass_fields__[k].default})

    @classmethod
    def from_json(cls, text: str) -> Limits:
        """Parse the variable's text.

        Raises:
            ValueError: if :meth:`to_json` cannot have written the text.

        >>> Limits.from_json('{"stage": "passes", "passes": 2}').passes
        2
        """
        limits = cls(**json.loads(text))
        if limits.stage not in get_args(Stage):
            raise ValueError(
                f"{VARIABLE}: unknown stage {limits.stage!r}; choose from {', '.join(get_args(Stage))}"
            )
        return limits

    def allowed_passes(self, passes: Sequence[Pass]) -> tuple[Pass, ...]:
        """Select the ``passes`` (in run order) that may run. The last one is limited to its sites."""
        progress.note("passes", [item.name for item in passes])
        if self.stage in ("eager", "capture", "partition"):
            return ()
        allowed = tuple(passes[: self.passes])
        if self.passes and len(allowed) == self.passes and not self.check:
            return (*allowed[:-1], _limit_sites(allowed[-1], self.sites))
        return allowed


@dataclass
class Record:
    """What a limited compilation met: stages, passes, sites. Written to the file as soon as it is known."""

    passes: list[str] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)
    lowerings: list[str] = field(default_factory=list)
    suspects: list[str] = field(default_factory=list)
    repro: str = ""


class _Progress:
    """The only owner of this process's record and counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._record = Record()

    def reset(self) -> None:
        """Restart counting."""
        with self._lock:
            self._record = Record()

    def note(self, name: str, value: Any) -> None:
        """Set a field of the record."""
        with self._lock:
            setattr(self._record, name, value)
            self._write()

    def count(self, name: str, what: str) -> int:
        """Append to a list of the record, and return the position."""
        with self._lock:
            found = getattr(self._record, name)
            found.append(what)
            self._write()
            return len(found) - 1

    def _write(self) -> None:
        limits = in_force()
        if limits is not None and limits.record:
            partial = Path(limits.record + ".part")
            partial.write_text(json.dumps(dataclasses.asdict(self._record)))
            partial.replace(limits.record)


progress = _Progress()


def in_force() -> Limits | None:
    """The limits in the environment variable, or ``None`` if it is not set.

    Raises:
        ValueError: if it holds something else.
    """
    text = os.environ.get(VARIABLE)
    return Limits.from_json(text) if text else None


@contextmanager
def limited_lowerings() -> Iterator[None]:
    """Make Inductor lower only as many operators in this block as the limits in force allow."""
    limits = in_force()
    if limits is None or limits.stage != "inductor":
        yield
        return

    def allowed(node: str) -> bool:
        position = progress.count("lowerings", node)
        return limits.lowerings is None or position < limits.lowerings

    from fxpasses._torch import filter_lowerings  # imports Inductor, which listing passes does not need

    with filter_lowerings(allowed):
        yield


def _limit_sites(item: Pass, sites: int | None) -> Pass:
    """Restrict the pass to its first ``sites`` match sites."""

    def allowed(name: str) -> bool:
        position = progress.count("sites", name)
        return sites is None or position < sites

    def apply(gm: fx.GraphModule) -> bool:
        with collect_sites() as found:
            trial = copy_graph(gm, constants=True)
            changed = item.apply(trial)
        if not found.claimed:
            return item.apply(gm) if changed and allowed(f"graph of {len(gm.graph.nodes)} nodes") else False
        verdicts = [allowed(str(site.location)) for site in found.claimed]
        with collect_sites(lambda index: verdicts[min(index, len(verdicts) - 1)]):
            return item.apply(gm)

    return FunctionPass(function=apply, name=item.name, contract=item.contract)
