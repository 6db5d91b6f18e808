"""``explain``: report what a function's backward passes became, and why."""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import fx

from compiled_autograd.session.compilers import as_compiler
from compiled_autograd.session.session import Session, sessions
from compiled_autograd.stats import CaptureRecord, FallbackRecord
from fake.wrong_arguments import check_dynamic, check_type


@dataclasses.dataclass(frozen=True)
class PassRecord:
    """One backward pass."""

    outcome: str
    """``capture``, ``hit`` or ``fallback``."""
    reason: str
    """Why the pass was captured, or ran in eager."""
    graph: fx.GraphModule | None
    """The graph that ran, or None for a fallback."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The result of `explain`; ``print`` it for a report."""

    passes: tuple[PassRecord, ...]
    """Every backward pass, in the order in which they ended."""
    captures: tuple[CaptureRecord, ...]
    """The captures, each with why no earlier graph could be reused."""
    fallbacks: tuple[FallbackRecord, ...]
    """The passes that ran in eager, and why."""
    result: Any
    """The return value of the function."""

    @property
    def graphs(self) -> tuple[fx.GraphModule, ...]:
        """The graphs that ran, without duplicates."""
        graphs: dict[int, fx.GraphModule] = {}
        for record in self.passes:
            if record.graph is not None:
                graphs.setdefault(id(record.graph), record.graph)
        return tuple(graphs.values())

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reason of each capture."""
        return tuple(record.reason for record in self.captures)

    def __str__(self) -> str:
        lines = [
            f"{len(self.passes)} backward passes, {len(self.captures)} captures, {len(self.fallbacks)} in eager"
        ]
        for number, record in enumerate(self.passes, 1):
            lines.append(f"{number}. {record.outcome}: {record.reason}")
        for capture in self.captures:
            lines += [f"   {name} stays a call: {reason}" for name, reason in capture.called]
        for number, graph in enumerate(self.graphs, 1):
            lines.append(f"graph {number}:\n{graph.code.strip()}")
        return "\n".join(lines)


def explain(fn: Callable[..., Any], *args: Any, dynamic: bool = True, **kwargs: Any) -> Explanation:
    """Call ``fn(*args, **kwargs)`` with capturing enabled, and report on its backward passes.

    Graphs run as captured, without a compiler. Running a graph that was captured before is reported as a hit.

    Raises:
        ArgumentTypeError: if ``fn`` is not callable.

    >>> import torch
    >>> from compiled_autograd import explain
    >>> x = torch.ones(3, requires_grad=True)
    >>> report = explain(lambda: x.cos().sum().backward())
    >>> len(report.passes), len(report.graphs), report.fallbacks
    (1, 1, ())
    """
    check_type("explain", "fn", fn, callable, "a function that calls backward, and its arguments after it")
    check_dynamic("explain", dynamic)
    passes: list[PassRecord] = []
    captures: list[CaptureRecord] = []
    fallbacks: list[FallbackRecord] = []

    def observe(outcome: str, record: Any) -> None:
        if outcome == "fallback":
            fallbacks.append(record)
            passes.append(PassRecord(outcome, record.reason, None))
        else:
            if outcome == "capture":
                captures.append(record)
            reason = record.reason if outcome == "capture" else "captured before"
            passes.append(PassRecord(outcome, reason, record.graph))

    session = Session(as_compiler(lambda graph: graph), dynamic)
    with sessions.entered(session), sessions.observed(observe):
        result = fn(*args, **kwargs)
    return Explanation(tuple(passes), tuple(captures), tuple(fallbacks), result)
