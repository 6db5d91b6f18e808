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
    generated_code,
    graph_break_of,
    kernels_of,
    recompile_reason,
    source_of,
    symbols_of,
)
from fxpasses.reports.text import type_text
from fxpasses.reports.versions import NODE_FIELDS, SCHEMA

_MAX_DIFF_LINES = 4000
"""How many lines of a diff are kept."""
_MAX_SOURCE_CHARS = 400_000
"""Source files with more characters are not kept."""
# Dynamo guards on what explain_miss compares: the metadata of tensors, and torch's global state.
_METADATA_GUARDS = re.compile(r"tensor '|\.(size|stride|storage_offset)\(\)|GLOBAL_STATE|grad_mode|autocast")


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
        self._start, self._counters_before = time.perf_counter(), counters.snapshot()
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
        self._data["ended"] = graph_break_of(gm)
        if earlier is not None:
            reason = recompile_reason()
            differs = (
                _describe_differences(earlier.differences)
                if not reason or _METADATA_GUARDS.search(reason)
                else []
            )
            self._data["recompiled"] = {"reason": reason, "differs": differs}
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        self._inputs = [parameter_name(source_of(node)) or str(node.target) for node in placeholders]
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
        rows = [self._node_row(node, index, costs) for node in gm.graph.nodes]
        inputs = {node.name: self._input_name(node) for node in gm.graph.nodes if node.op == "placeholder"}
        self._data["graphs"][kind] = {
            "nodes": rows,
            "inputs": {name: meaning for name, meaning in inputs.items() if meaning},
        }
        self._data["passes"] = [_pass_data(run) for run in runs]
        partition = gm.meta.get(META_KEY)
        if partition is not None and kind == "forward":
            self._data["partition"] = {
                **_fields(partition, _PARTITION_FIELDS),
                "saved": [[v.name, v.bytes, v.source, v.kind, v.reason] for v in partition.saved],
                "recomputed": [[v.name, v.flops, v.source, v.reason] for v in partition.recomputed],
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
        failure = {"stage": error.stage, "reason": reason, "location": str(error.location)}
        if failure not in self._data["fallbacks"]:
            self._data["fallbacks"].append(failure)

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
            "repeats": [_fields(item, _REGION_FIELDS) for item in (*report.taken, *report.left)],
        }

    def data(self) -> dict[str, Any]:
        """Return all that is recorded so far."""
        before, after = self._counters_before, counters.snapshot()
        spent = {stage: seconds - before.seconds.get(stage, 0.0) for stage, seconds in after.seconds.items()}
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
                "total": time.perf_counter() - self._start,
                "stages": {
                    stage: seconds for stage, seconds in spent.items() if seconds > 0 and stage != "total"
                },
            },
            "isolated": [_fields(call, _ISOLATED_FIELDS) for call in after.isolated[len(before.isolated) :]],
            "lines": self._lines.rows,
            "modules": self._modules.rows,
            "targets": self._targets.rows,
            "sources": dict(_sources(self._lines.rows)),
        }

    def write(self, directory: Path) -> None:
        """Write ``graph.json`` atomically, so that a reader never sees half of it."""
        temporary = directory / "graph.json.tmp"
        temporary.write_text(json.dumps(self.data(), default=str, separators=(",", ":")))
        os.replace(temporary, directory / "graph.json")

    def _node_row(self, node: fx.Node, index: dict[fx.Node, int], costs: CostModel) -> list[Any]:
        origin, value = provenance(node), value_of(node)
        line = (origin.file, origin.line, origin.function, origin.code)
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
            self._lines.add(line) if origin.file else -1,
            self._modules.add((origin.module, origin.module_type))
            if origin.module or origin.module_type
            else -1,
            int(origin.backward),
            origin.forward_node,
        ]

    def _input_name(self, node: fx.Node) -> str:
        """Return an input's name in the user's program, or "" for values handed to a backward graph."""
        match = re.fullmatch(r"(?:primals|arg)_?(\d+)(?:_1)?", node.name)
        if match is None:
            return ""
        position = int(match[1]) - (1 if node.name.startswith("primals") else 0)
        return self._inputs[position] if 0 <= position < len(self._inputs) else ""


def parameter_name(source: str) -> str:
    """Convert the expression by which Dynamo finds a value into a path in the user's model.

    >>> parameter_name("L['self']._modules['blocks']._modules['0']._parameters['weight']")
    'blocks.0.weight'
    >>> parameter_name("L['x']")
    'x'
    """
    parts = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", source)
    match = re.fullmatch(r"[LG]\['([^']*)'\](.*)", parts)
    if match is None:
        return parts
    return match[2][1:] if parts != source and match[2].startswith(".") else match[1] + match[2]


def _describe_differences(differences: Sequence[Difference]) -> list[str]:
    """Describe the differences from the last compilation.

    Shapes are reduced to the dimensions that differ. Symbols and calls that follow from them are omitted.
    """
    has_shape_change = any(d.factor.startswith("shape of input") for d in differences)
    texts = []
    for difference in differences:
        sizes = [text.strip("(),").split(", ") for text in (difference.first, difference.second)]
        if difference.factor.startswith("shape of input") and len(sizes[0]) == len(sizes[1]):
            changed = [(i, a, b) for i, (a, b) in enumerate(zip(*sizes, strict=True)) if a != b]
            texts += [f"{difference.factor}, dimension {i}: {a} -> {b}" for i, a, b in changed]
        elif not has_shape_change or not difference.factor.endswith((" of the graph", "dynamic sizes")):
            texts.append(str(difference))
    return texts


_PARTITION_FIELDS = (
    "memory_budget saved_bytes static_bytes bytes_at_full_budget bytes_at_zero_budget recomputed_flops curve"
)
_REGION_FIELDS = "name copies calls modules taken reason saved_seconds costs"
_ISOLATED_FIELDS = "node target source reason"


def _fields(item: Any, names: str) -> dict[str, Any]:
    """Return the attributes of an object that the report keeps."""
    return {name: getattr(item, name) for name in names.split()}


def _pass_data(run: PassRun) -> dict[str, Any]:
    data = run.to_dict(texts=False)
    if run.changed:
        lines = run.diff.splitlines()
        data["diff"] = list(itertools.islice(lines, _MAX_DIFF_LINES))
        data["diff_left_out"] = max(0, len(lines) - _MAX_DIFF_LINES)
    return data


def _sources(lines: Iterable[tuple[str, int, str, str]]) -> Iterable[tuple[str, str]]:
    """Yield the current text of the files that the lines belong to."""
    for file in dict.fromkeys(line[0] for line in lines):
        text = "".join(linecache.getlines(file))  # includes notebook cells
        if text and len(text) <= _MAX_SOURCE_CHARS:
            yield file, text
