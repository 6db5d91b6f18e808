"""The record of a compilation as plain data: ``graph.json`` in each graph's directory.

The documentation page on reports describes its fields. Texts that occur often (source lines, modules,
operators) are in tables, and nodes are rows with indices into them: a step of 48 layers has thousands of
nodes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import linecache
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

import fake
import fxpasses
from fxpasses.compiling.history import Difference, Miss
from fxpasses.compiling.options import Options
from fxpasses.counters import counters
from fxpasses.errors import StageError
from fxpasses.graphs.provenance import provenance
from fxpasses.graphs.rewriting import value_of
from fxpasses.partitioner import META_KEY
from fxpasses.partitioner.cost import CostModel, is_view
from fxpasses.pass_manager.runs import PassRun
from fxpasses.reports._torch import (
    cache_key,
    end_of_graph,
    generated_code,
    kernels_of,
    recompile_reason,
    source_of,
    symbols_of,
)
from fxpasses.reports.text import type_text
from fxpasses.reports.versions import NODE_FIELDS, SCHEMA

_LONGEST_DIFF = 4000
"""How many lines of a diff are kept."""
_LARGEST_SOURCE = 400_000
"""Source files with more characters are not kept."""
# Dynamo guards on what explain_miss compares: the metadata of tensors, and torch's global state.
_OF_INPUTS = re.compile(r"tensor '|\.(size|stride|storage_offset)\(\)|GLOBAL_STATE|grad_mode|autocast")


class _Table:
    """Unique values, indexed in the order in which they were first seen."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._index: dict[Any, int] = {}

    def add(self, row: Any) -> int:
        """Return the index of a row, adding it if it is new."""
        if row not in self._index:
            self._index[row] = len(self.rows)
            self.rows.append(row)
        return self._index[row]


class Recorder:
    """Collects what the stages of compiling one graph report."""

    def __init__(self) -> None:
        self._lines, self._modules, self._targets = _Table(), _Table(), _Table()
        self._inputs: list[str] = []
        self._verdicts: Mapping[tuple[str, str], str] = {}
        self._since, self._stages = time.perf_counter(), counters.snapshot()
        self._data: dict[str, Any] = {
            "schema": SCHEMA,
            "versions": {"fxpasses": fxpasses.__version__, "torch": str(torch.__version__)},
            "process": f"{os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}",
            "node_fields": NODE_FIELDS,
            "graphs": {},
            "passes": [],
            "partition": None,
            "guards": [],
            "symbols": [],
            "ended": None,
            "recompiled": None,
            "regions": None,
            "kernels": [],
            "fallbacks": [],
        }

    def dynamo(self, gm: fx.GraphModule, options: Options, earlier: Miss | None = None) -> None:
        """Record what Dynamo's inputs are called in the user's program, why the graph ends and recompiles.

        Args:
            gm: the graph.
            options: the options of the compilation.
            earlier: the differences from the last compilation of the same code.
        """
        self._data["ended"] = end_of_graph(gm)
        if earlier is not None:
            reason = recompile_reason()
            differs = _causes(earlier.differences) if not reason or _OF_INPUTS.search(reason) else []
            self._data["recompiled"] = {"reason": reason, "differs": differs}
        holders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self._inputs = [parameter_name(source_of(node)) or str(node.target) for node in holders]
        self._data["options"] = str(options)
        self._data["settings"] = {
            f.name: ", ".join(map(str, options.passes))
            if f.name == "passes"
            else str(getattr(options, f.name))
            for f in dataclasses.fields(options)
        }

    def graph(self, kind: str, gm: fx.GraphModule, runs: Iterable[PassRun] = ()) -> None:
        """Record a graph and the passes that ran on it.

        Args:
            kind: the kind of graph.
            gm: the graph.
            runs: what each pass did.
        """
        costs = CostModel()
        index = {node: number for number, node in enumerate(gm.graph.nodes)}
        rows = [self._row(node, index, costs) for node in gm.graph.nodes]
        inputs = {node.name: self._name(node) for node in gm.graph.nodes if node.op == "placeholder"}
        self._data["graphs"][kind] = {
            "nodes": rows,
            "inputs": {name: meaning for name, meaning in inputs.items() if meaning},
        }
        self._data["passes"] = [_described(run) for run in runs]
        found = gm.meta.get(META_KEY)
        if found is not None and kind == "forward":
            self._data["partition"] = {
                **_fields(found, _OF_PARTITIONS),
                "saved": [[v.name, v.bytes, v.source, v.kind, v.reason] for v in found.saved],
                "recomputed": [[v.name, v.flops, v.source, v.reason] for v in found.recomputed],
            }

    def lowered(self, kind: str, parts: Sequence[Any]) -> None:
        """Record what Inductor made of a graph, part by part. Args: the kind of graph, and its parts."""
        names = {row[0] for row in self._data["graphs"].get(kind, {}).get("nodes", ())}
        for part in parts:
            code = generated_code(part.compiled)
            kernels = [
                [kernel, [name for n in found if (name := part.names.get(n)) in names]]
                for kernel, found in kernels_of(part.compiled).items()
                if kernel.partition(":")[0] in code
            ]
            if code:
                self._data["kernels"].append(
                    {
                        "graph": kind,
                        "key": cache_key(part.compiled),
                        "code": code,
                        "kernels": kernels,
                        "from_cache": part.from_cache,
                    }
                )

    def failed(self, error: StageError) -> None:
        """Record a failed stage once: a graph around a region that fails raises the same error."""
        reason = f"pass {error.pass_name!r}: {error.reason}" if error.pass_name else error.reason
        found = {"stage": error.stage, "reason": reason, "location": str(error.location)}
        if found not in self._data["fallbacks"]:
            self._data["fallbacks"].append(found)

    def guards(self, shape_env: Any, graph: fx.Graph) -> None:
        """Record the sizes for which the graphs hold."""
        self._data["guards"] = json.loads(
            json.dumps(fake.explain(shape_env, graph=graph).to_dict(), default=str)
        )
        self._data["symbols"] = symbols_of(shape_env)

    def verdicts(self, found: Mapping[tuple[str, str], str]) -> None:
        """Record what the value check says of the passes."""
        self._verdicts = dict(found)

    def regions(self, report: Any) -> None:
        """Record the repeated subgraphs of Dynamo's graph."""
        self._data["regions"] = {
            "text": str(report),
            "repeats": [_fields(item, _OF_REGIONS) for item in (*report.taken, *report.left)],
        }

    def data(self) -> dict[str, Any]:
        """Return all that is recorded so far."""
        then, now = self._stages, counters.snapshot()
        spent = {stage: seconds - then.seconds.get(stage, 0.0) for stage, seconds in now.seconds.items()}
        return {
            **self._data,
            "passes": [
                {
                    **run,
                    "verdict": self._verdicts.get((run["graph"], run["name"]), "") if run["changed"] else "",
                }
                for run in self._data["passes"]
            ],
            "seconds": {
                "total": time.perf_counter() - self._since,
                "stages": {
                    stage: seconds for stage, seconds in spent.items() if seconds > 0 and stage != "total"
                },
            },
            "isolated": [_fields(call, _OF_ISOLATED) for call in now.isolated[len(then.isolated) :]],
            "lines": self._lines.rows,
            "modules": self._modules.rows,
            "targets": self._targets.rows,
            "sources": dict(_sources(self._lines.rows)),
        }

    def write(self, directory: Path) -> None:
        """Write ``graph.json`` atomically, so that a reader never sees half of it."""
        unfinished = directory / "graph.json.tmp"
        unfinished.write_text(json.dumps(self.data(), default=str, separators=(",", ":")))
        os.replace(unfinished, directory / "graph.json")

    def _row(self, node: fx.Node, index: dict[fx.Node, int], costs: CostModel) -> list[Any]:
        found, value = provenance(node), value_of(node)
        line = (found.file, found.line, found.function, found.code)
        target = node.op if node.op in ("placeholder", "output") else str(node.target)
        if node.op == "call_function" and not hasattr(node.target, "_schema"):
            target = getattr(node.target, "__name__", target)
        is_call = node.op == "call_function"
        return [
            node.name,
            self._targets.add(target),
            "" if node.op == "output" else type_text(value),
            str(list(value.stride()))
            if isinstance(value, torch.Tensor) and value.layout is torch.strided
            else "",
            0 if node.op == "output" else costs.bytes_of(node),
            costs.flops_of(node),
            int(is_call and is_view(node)),
            [index[n] for n in node.all_input_nodes],
            self._lines.add(line) if found.file else -1,
            self._modules.add((found.module, found.module_type)) if found.module or found.module_type else -1,
            int(found.backward),
            found.forward_node,
        ]

    def _name(self, node: fx.Node) -> str:
        """Return an input's name in the user's program, or "" for values handed to a backward graph."""
        numbered = re.fullmatch(r"(?:primals|arg)_?(\d+)(?:_1)?", node.name)
        if numbered is None:
            return ""
        position = int(numbered[1]) - (1 if node.name.startswith("primals") else 0)
        return self._inputs[position] if 0 <= position < len(self._inputs) else ""


def parameter_name(source: str) -> str:
    """Convert the expression by which Dynamo finds a value into a path in the user's model.

    >>> parameter_name("L['self']._modules['blocks']._modules['0']._parameters['weight']")
    'blocks.0.weight'
    >>> parameter_name("L['x']")
    'x'
    """
    parts = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", source)
    rooted = re.fullmatch(r"[LG]\['([^']*)'\](.*)", parts)
    if rooted is None:
        return parts
    return rooted[2][1:] if parts != source and rooted[2].startswith(".") else rooted[1] + rooted[2]


def _causes(differences: Sequence[Difference]) -> list[str]:
    """Describe the differences from the last compilation.

    Shapes are reduced to the dimensions that differ. Symbols and calls that follow from them are omitted.
    """
    sized = any(d.factor.startswith("shape of input") for d in differences)
    told = []
    for found in differences:
        sizes = [text.strip("(),").split(", ") for text in (found.first, found.second)]
        if found.factor.startswith("shape of input") and len(sizes[0]) == len(sizes[1]):
            changed = [(i, a, b) for i, (a, b) in enumerate(zip(*sizes, strict=True)) if a != b]
            told += [f"{found.factor}, dimension {i}: {a} -> {b}" for i, a, b in changed]
        elif not sized or not found.factor.endswith((" of the graph", "dynamic sizes")):
            told.append(str(found))
    return told


_OF_PARTITIONS = (
    "memory_budget saved_bytes static_bytes bytes_at_full_budget bytes_at_zero_budget recomputed_flops curve"
)
_OF_REGIONS = "name copies calls modules taken reason saved_seconds costs"
_OF_ISOLATED = "node target source reason"


def _fields(item: Any, names: str) -> dict[str, Any]:
    """Return the attributes of an object that the report keeps."""
    return {name: getattr(item, name) for name in names.split()}


def _described(run: PassRun) -> dict[str, Any]:
    data = run.to_dict(texts=False)
    if run.changed:
        lines = run.diff.splitlines()
        data["diff"] = list(itertools.islice(lines, _LONGEST_DIFF))
        data["diff_left_out"] = max(0, len(lines) - _LONGEST_DIFF)
    return data


def _sources(lines: Iterable[tuple[str, int, str, str]]) -> Iterable[tuple[str, str]]:
    """Yield the current text of the files that the lines belong to."""
    for file in dict.fromkeys(line[0] for line in lines):
        text = "".join(linecache.getlines(file))  # includes notebook cells
        if text and len(text) <= _LARGEST_SOURCE:
            yield file, text
