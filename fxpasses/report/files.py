"""One directory a graph: each stage's graph as annotated Python, and the record of the passes."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import torch
from torch import fx

import fake
from fxpasses.compiling.observing import Observer
from fxpasses.graphs.provenance import provenance
from fxpasses.graphs.rewriting import value_of
from fxpasses.partitioner import META_KEY

__all__ = ["GraphFiles", "annotated_code"]


class GraphFiles(Observer):
    """Writes each graph to ``DIRECTORY/graph_N/``: ``traced.py`` (before passes), ``joint.py``, ``forward.py``,
    ``backward.py`` or ``inference.py`` (after them), ``passes.txt``, ``partition.txt`` (what is saved and why),
    ``guards.txt`` (for which sizes the graph holds, who asked and why), and, where the graph has repeats, ``regions.txt`` and the same files for each region in ``regions/``.

    Raises:
        OSError: when the directory cannot be written.
    """

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._root = Path(directory)
        self._root.mkdir(parents=True, exist_ok=True)

    @functools.cached_property
    def directory(self) -> Path:
        """This graph's own directory, made when there is something to write."""
        for number in itertools.count():
            directory = self._root / f"graph_{number}"
            try:
                directory.mkdir()
                return directory
            except FileExistsError:
                continue
        raise AssertionError("itertools.count() ended")

    def joint(self, gm: fx.GraphModule) -> None:
        self._write("traced", gm)

    def graph(self, kind: str, gm: fx.GraphModule) -> None:
        self._write(kind, gm)
        (self.directory / "passes.txt").write_text("".join(f"{run}\n" for run in self.runs))
        if META_KEY in gm.meta:
            (self.directory / "partition.txt").write_text(f"{gm.meta[META_KEY]}\n")

    def guards(self, shape_env: Any, graph: fx.Graph) -> None:
        (self.directory / "guards.txt").write_text(f"{fake.explain(shape_env, graph=graph)}\n")

    def regions(self, report: object) -> None:
        (self.directory / "regions.txt").write_text(f"{report}\n")

    def of_region(self) -> GraphFiles:
        return GraphFiles(str(self.directory / "regions"))

    def _write(self, name: str, gm: fx.GraphModule) -> None:
        (self.directory / f"{name}.py").write_text(annotated_code(gm))


def annotated_code(gm: fx.GraphModule) -> str:
    """The graph as text: one call a line with the type of its value, under the user's line that it is from."""
    lines: list[str] = []
    last = ""
    for node in gm.graph.nodes:
        if node.op == "output":
            lines.append(f"return {node.args[0]}")
            continue
        where = _where(node)
        if where != last and node.op != "placeholder":
            lines += ["", f"# {where}"] if where else [""]
            last = where
        lines.append(_line(node))
    return "\n".join(lines) + "\n"


def _where(node: fx.Node) -> str:
    found = provenance(node)
    parts = [found.source]
    if found.module:
        parts.append(f"module {found.module} ({found.module_type})")
    if found.forward_node:
        parts.append(f"gradient of {found.forward_node}")
    return " | ".join(part for part in parts if part)


def _line(node: fx.Node) -> str:
    kind = _type(value_of(node))
    if node.op == "placeholder":
        return f"{node.name}: {kind} = input"
    if node.op == "get_attr":
        return f"{node.name}: {kind} = self.{node.target}"
    arguments = [str(a) for a in node.args] + [f"{k}={v}" for k, v in node.kwargs.items()]
    name = node.target.__name__ if not hasattr(node.target, "_schema") else str(node.target)  # type: ignore[union-attr]
    return f"{node.name}: {kind} = {name}({', '.join(arguments)})"


def _type(value: object) -> str:
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        return f"{name}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(map(_type, value)) + ")"
    return type(value).__name__
