"""The factors that decided each compilation, compared with earlier ones to explain cache misses."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from fake.notebook import as_html
from fxpasses.compiling.factors import compile_factors, graph_text
from fxpasses.compiling.options import Options
from fxpasses.errors import OptionsError
from fxpasses.pass_manager.identity import Identity

_MAX_RECORDS = 64
"""How many compilations are remembered."""


@dataclass(frozen=True)
class Compilation:
    """Everything that determines the compilation result of one Dynamo graph.

    Attributes:
        graph: the calls of the Dynamo graph, one per line.
        factors: versions, settings, options and inputs, by name, in the order in which they are compared.
        passes: the identity of each pass, in order.
        from_cache: whether the whole result came from AOTAutograd's cache.
    """

    graph: str
    factors: Mapping[str, str]
    passes: tuple[Identity, ...]
    from_cache: bool = False

    def to_json(self) -> str:
        """Serialize the record to JSON, to compare it with another process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Compilation:
        """Parse the output of :meth:`to_json`."""
        data = json.loads(text)
        passes = tuple(Identity(p["name"], p["factors"], tuple(p["unknown"])) for p in data["passes"])
        return cls(data["graph"], data["factors"], passes, data["from_cache"])


@dataclass(frozen=True)
class Difference:
    """One factor in which two compilations differ.

    Attributes:
        factor: its name.
        first: its value in the first compilation, "" if it is missing there.
        second: its value in the second one.
    """

    factor: str
    first: str = ""
    second: str = ""

    def __str__(self) -> str:
        if not (self.first or self.second):
            return self.factor
        return f"{self.factor}: {self.first or 'missing'} -> {self.second or 'missing'}"


@dataclass(frozen=True)
class Miss:
    """Why two compilations do not share a cache entry.

    Attributes:
        differences: all factors that differ, the most general first: a version explains what a graph does
            not.
        uncached: the reasons why they could not be cached at all.
    """

    differences: tuple[Difference, ...]
    uncached: tuple[str, ...] = ()

    @property
    def factor(self) -> str | None:
        """The factor to blame: the first one that differs, or ``None`` if none does."""
        return self.differences[0].factor if self.differences else None

    def _repr_html_(self) -> str:
        rows = [(d.factor, d.first, d.second) for d in self.differences]
        return as_html(
            "\n".join(self.uncached) or str(self).partition("\n")[0], ("factor", "first", "second"), rows
        )

    def __str__(self) -> str:
        lines = [f"cannot be cached: {reason}" for reason in self.uncached]
        if not self.differences:
            return "\n".join([*lines, "nothing that decides the result is different"])
        lines.append(f"the cache entry differs in {self.differences[0]}")
        lines += [f"also: {difference}" for difference in self.differences[1:]]
        return "\n".join(lines)


def explain_miss(a: Compilation | str | os.PathLike[str], b: Compilation | str | os.PathLike[str]) -> Miss:
    """List the differences that kept the second compilation from loading the first one's result.

    Args:
        a: a record of :func:`compilations`, or a file with the output of its ``to_json``.
        b: the other one.

    Raises:
        OptionsError: if one of them is something else. Names which.

    >>> import torch, fxpasses
    >>> def f(x): return x.sin()
    >>> for budget in (0.5, 1.0):
    ...     options = {"compiler": "eager", "memory_budget": budget}
    ...     result = torch.compile(f, backend="fxpasses", options=options)(torch.ones(2))
    ...     torch._dynamo.reset()
    >>> print(fxpasses.explain_miss(*fxpasses.compilations()[-2:]))
    the cache entry differs in option memory_budget: 0.5 -> 1.0
    """
    first, second = _load_compilation("a", a), _load_compilation("b", b)
    differences = {
        name: Difference(name, first.factors.get(name, ""), second.factors.get(name, ""))
        for name in dict.fromkeys((*first.factors, *second.factors))
        if first.factors.get(name) != second.factors.get(name)
    }
    inputs = [d for name, d in differences.items() if " of input " in name]
    settings = [d for name, d in differences.items() if " of input " not in name]
    graph = _graph_differences(first.graph, second.graph)
    if "training mode" in differences or "dynamic sizes" in differences:  # what follows is not listed
        inputs = [d for d in inputs if d.first and d.second and not _became_symbolic(d)]
        graph = []
    if not (inputs or graph):  # Dynamo's settings matter only through these
        settings = [d for d in settings if not d.factor.startswith("dynamo setting")]
    found = [
        *settings,
        *_pass_differences(first.passes, second.passes),
        *_merge_input_differences(inputs),
        *graph,
    ]
    uncached = {
        f"pass {item.name!r} depends on {label}, which has no value that can be hashed"
        for item in (*first.passes, *second.passes)
        for label in item.unknown
    }
    return Miss(tuple(found), tuple(sorted(uncached)))


def _became_symbolic(difference: Difference) -> bool:
    """Whether a shape is symbolic on exactly one side."""
    symbolic = [any(c.isalpha() for c in text) for text in (difference.first, difference.second)]
    return difference.factor.startswith("shape") and symbolic[0] != symbolic[1]


def _merge_input_differences(inputs: Sequence[Difference]) -> list[Difference]:
    """Merge the differences of inputs that differ in the same property in the same way."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for difference in inputs:
        kind, _, name = difference.factor.partition(" of input ")
        groups.setdefault((kind, difference.first, difference.second), []).append(name)
    return [
        Difference(f"{kind} of input{'s' if len(names) > 1 else ''} {', '.join(names)}", first, second)
        for (kind, first, second), names in groups.items()
    ]


def describe_compilation(gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Compilation:
    """Describe a compilation before any stage has run.

    Args:
        gm: the Dynamo graph.
        inputs: its example inputs: fake tensors and symbolic sizes.
        options: the options of the compilation, including passes.

    Returns:
        The graph as text, the other deciding factors, and the identities of the passes.
    """
    passes = tuple(item.identify() for item in options.passes)
    return Compilation(graph_text(gm), compile_factors(gm, inputs, options), passes)


class _Recent:
    """The only owner of the remembered compilations."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: deque[tuple[Compilation, int | None]] = deque(maxlen=_MAX_RECORDS)

    def add(self, made: Compilation, frame: int | None) -> None:
        with self._lock:
            self._records.append((made, frame))

    def of_frame(self, frame: int | None) -> Compilation | None:
        """The last compilation of the code that has this Dynamo frame number."""
        with self._lock:
            return next((made for made, other in reversed(self._records) if other == frame), None)

    def all(self) -> tuple[Compilation, ...]:
        with self._lock:
            return tuple(made for made, _ in self._records)

    def reset(self) -> None:
        with self._lock:
            self._records.clear()


recent = _Recent()


def compilations() -> tuple[Compilation, ...]:
    """The last compilations of this process, the newest last."""
    return recent.all()


def reset_compilations() -> None:
    """Forget all compilations."""
    recent.reset()


def _load_compilation(argument: str, given: Any) -> Compilation:
    if isinstance(given, Compilation):
        return given
    if not isinstance(given, (str, os.PathLike)):
        raise OptionsError(f"explain_miss: {argument}", given, "a record of compilations(), or a file of one")
    try:
        return Compilation.from_json(Path(given).read_text())
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"explain_miss: {argument}: {given} is no record that Compilation.to_json wrote: {error!r}"
        raise OptionsError(argument, given, problem=problem) from error


def _pass_differences(a: Sequence[Identity], b: Sequence[Identity]) -> list[Difference]:
    names_a, names_b = [item.name for item in a], [item.name for item in b]
    found = []
    if names_a != names_b:
        missing = [name for name in names_b if names_b.count(name) > names_a.count(name)]
        extra = [name for name in names_a if names_a.count(name) > names_b.count(name)]
        found += [Difference(f"pass {name!r} is only in the second") for name in dict.fromkeys(missing)]
        found += [Difference(f"pass {name!r} is only in the first") for name in dict.fromkeys(extra)]
        if not found:
            found = [Difference("order of the passes", ", ".join(names_a), ", ".join(names_b))]
    seen: set[str] = set()
    for name in dict.fromkeys(names_a):
        for first, second in zip(
            [i for i in a if i.name == name], [i for i in b if i.name == name], strict=False
        ):
            for label in first.differences(second):
                text = f"{label} of pass {name!r}"
                if text not in seen:
                    seen.add(text)
                    values = (_short(item.factors.get(label, "")) for item in (first, second))
                    found.append(Difference(text, *values))
    return found


def _graph_differences(a: str, b: str) -> list[Difference]:
    if a == b:
        return []
    lines_a, lines_b = a.splitlines(), b.splitlines()
    for number, (first, second) in enumerate(zip(lines_a, lines_b, strict=False), 1):
        if first != second:
            return [Difference(f"line {number} of the graph", first, second)]
    return [Difference("length of the graph", f"{len(lines_a)} nodes", f"{len(lines_b)} nodes")]


def _short(digest: str) -> str:
    return digest[:12] if len(digest) == 64 else digest
