"""What decided each compilation, and which of it was different: for the question why a cache did not help."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxpasses._torch import functorch_config, inductor_config
from fxpasses.identity import Identity
from fxpasses.inductor import own_source
from fxpasses.options import Options

__all__ = [
    "Compilation",
    "Difference",
    "Miss",
    "compilations",
    "explain_miss",
    "record",
    "reset_compilations",
]

_KEPT = 64
"""How many compilations are remembered."""


@dataclass(frozen=True)
class Compilation:
    """Everything that decides what one Dynamo graph is compiled to.

    Attributes:
        graph: the calls of the Dynamo graph, one a line.
        factors: versions, settings, options and inputs, by name; in the order in which they are looked at.
        passes: the identity of each pass, in order.
        from_cache: whether it came whole from AOTAutograd's cache.
    """

    graph: str
    factors: Mapping[str, str]
    passes: tuple[Identity, ...]
    from_cache: bool = False

    def to_json(self) -> str:
        """The record as JSON, for a comparison with another process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Compilation:
        """What :meth:`to_json` has written."""
        data = json.loads(text)
        passes = tuple(Identity(p["name"], p["factors"], tuple(p["unknown"])) for p in data["passes"])
        return cls(data["graph"], data["factors"], passes, data["from_cache"])


@dataclass(frozen=True)
class Difference:
    """One factor that two compilations do not share.

    Attributes:
        factor: its name.
        first: its value in the first one, "" where it is missing.
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
        differences: every factor that differs, the most general first: a version explains what a graph does not.
        uncached: what kept them from being cached at all.
    """

    differences: tuple[Difference, ...]
    uncached: tuple[str, ...] = ()

    @property
    def factor(self) -> str | None:
        """The factor to blame: the only one, or the first of several; ``None`` when there is none."""
        return self.differences[0].factor if self.differences else None

    def __str__(self) -> str:
        lines = [f"cannot be cached: {reason}" for reason in self.uncached]
        if not self.differences:
            return "\n".join([*lines, "nothing that decides the result is different"])
        lines.append(f"the cache entry differs in {self.differences[0]}")
        lines += [f"also: {difference}" for difference in self.differences[1:]]
        return "\n".join(lines)


def explain_miss(a: Compilation | str | os.PathLike[str], b: Compilation | str | os.PathLike[str]) -> Miss:
    """Name what differs between two compilations, so that the second could not load what the first had stored.

    Args:
        a: a record of :func:`compilations`, or a file with what its ``to_json`` gave.
        b: the other one.

    >>> import torch, fxpasses
    >>> def f(x): return x.sin()
    >>> for budget in (0.5, 1.0):
    ...     options = {"compiler": "eager", "memory_budget": budget}
    ...     result = torch.compile(f, backend="fxpasses", options=options)(torch.ones(2))
    ...     torch._dynamo.reset()
    >>> print(fxpasses.explain_miss(*fxpasses.compilations()[-2:]))
    the cache entry differs in option memory_budget: 0.5 -> 1.0
    """
    first, second = _loaded(a), _loaded(b)
    differences = [
        Difference(name, first.factors.get(name, ""), second.factors.get(name, ""))
        for name in dict.fromkeys((*first.factors, *second.factors))
        if first.factors.get(name) != second.factors.get(name)
    ]
    settings = [d for d in differences if not d.factor.startswith("input ")]
    inputs = [d for d in differences if d.factor.startswith("input ")]
    found = [*settings, *_pass_differences(first.passes, second.passes), *inputs]
    found += _graph_differences(first.graph, second.graph)
    uncached = {
        f"pass {item.name!r} depends on {label}, which has no value that can be hashed"
        for item in (*first.passes, *second.passes)
        for label in item.unknown
    }
    return Miss(tuple(found), tuple(sorted(uncached)))


def record(gm: fx.GraphModule, inputs: Sequence[Any], options: Options) -> Compilation:
    """What decides the compilation of ``gm``, as it is before any stage has run."""
    factors: dict[str, str] = {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "fxpasses source": own_source(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "gradients enabled": str(torch.is_grad_enabled()),
        "inference mode": str(torch.is_inference_mode_enabled()),
        "autocast": str({kind: _autocast(kind) for kind in ("cpu", "cuda")}),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "default dtype": str(torch.get_default_dtype()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
    }
    patched = options.inductor_patches()
    for name, config, patches in (
        ("inductor", inductor_config, patched),
        ("functorch", functorch_config, {}),
    ):
        values = {**config.get_config_copy(), **patches}  # type: ignore[attr-defined]
        factors |= {f"{name} setting {key}": repr(value) for key, value in values.items() if _says(value)}
    for field in dataclasses.fields(options):
        if field.name not in ("passes", "inductor", "report"):
            factors[f"option {field.name}"] = repr(getattr(options, field.name))
    factors |= {f"input {i}": _describe(value) for i, value in enumerate(inputs)}
    return Compilation(_text(gm), factors, tuple(item.identify() for item in options.passes))


class _Recent:
    """The one owner of the remembered compilations."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: deque[Compilation] = deque(maxlen=_KEPT)

    def add(self, made: Compilation) -> None:
        with self._lock:
            self._records.append(made)

    def all(self) -> tuple[Compilation, ...]:
        with self._lock:
            return tuple(self._records)

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


def _loaded(given: Compilation | str | os.PathLike[str]) -> Compilation:
    return given if isinstance(given, Compilation) else Compilation.from_json(Path(given).read_text())


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


def _text(gm: fx.GraphModule) -> str:
    lines = []
    for node in gm.graph.nodes:
        target = node.target if isinstance(node.target, str) else _qualified(node.target)
        lines.append(f"{node.name} = {node.op} {target} {node.args} {node.kwargs or ''}".rstrip())
    for name, child in gm.named_children():
        if isinstance(child, fx.GraphModule):
            lines += [f"{name}: {line}" for line in _text(child).splitlines()]
    return "\n".join(lines)


def _qualified(target: Any) -> str:
    module, name = getattr(target, "__module__", ""), getattr(target, "__qualname__", "")
    return f"{module}.{name}" if name else str(target)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        strides = f" strides {tuple(value.stride())}" if value.layout is torch.strided else ""
        gradient = " requires gradient" if value.requires_grad else ""
        return f"{value.dtype}{tuple(value.shape)}{strides} on {value.device}{gradient}"
    return str(value)


def _autocast(device: str) -> str:
    return str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else "off"


def _says(value: Any) -> bool:
    """Whether a setting has a value that says the same in every process."""
    return " at 0x" not in repr(value)


def _short(digest: str) -> str:
    return digest[:12] if len(digest) == 64 else digest
