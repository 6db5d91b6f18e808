"""A comparison of two reports: their graphs, times, memory, passes and guards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from fxpasses.reports.versions import NODE_FIELDS, SCHEMA

_TARGET_COLUMN = NODE_FIELDS.index("target")
_FLOPS_COLUMN = NODE_FIELDS.index("flops")


def compare(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the differences of two reports, for each graph in the order of compilation.

    Args:
        before: a report, from :func:`fxpasses.reports.page.read_report`.
        after: the report to compare with it.

    Returns:
        ``schema``; ``graphs``: for each graph in both a list of ``[what, before, after]``, grouped by title
        under ``groups``; ``only_before`` and ``only_after``: names of graphs that the other report lacks.
    """
    old = {graph["name"]: graph for graph in before["graphs"]}
    new = {graph["name"]: graph for graph in after["graphs"]}
    return {
        "schema": SCHEMA,
        "graphs": [
            {"name": name, "groups": dict(_groups(old[name], new[name]))} for name in new if name in old
        ],
        "only_before": [name for name in old if name not in new],
        "only_after": [name for name in new if name not in old],
    }


def _groups(old: dict[str, Any], new: dict[str, Any]) -> Iterable[tuple[str, list[list[Any]]]]:
    """Yield groups of rows, omitting those without a difference."""
    versions = _differing_rows(old["versions"], new["versions"])
    yield from _group_if_any(
        "Versions and options", [*versions, *_differing_rows(_settings(old), _settings(new))]
    )
    yield from _group_if_any("Nodes", _differing_rows(_node_counts(old), _node_counts(new)))
    for kind in dict.fromkeys((*old["graphs"], *new["graphs"])):
        if kind != "joint":
            yield from _group_if_any(
                f"Operators, {kind}",
                _differing_rows(_operator_counts(old, kind), _operator_counts(new, kind)),
            )
    yield from _group_if_any("Bytes and FLOPs", _differing_rows(_bytes_and_flops(old), _bytes_and_flops(new)))
    yield from _group_if_any("Seconds", _differing_rows(old["seconds"]["stages"], new["seconds"]["stages"]))
    yield from _group_if_any(
        "Sites rewritten by passes", _differing_rows(_match_counts(old), _match_counts(new))
    )
    guards = [Counter(guard["expression"] for guard in graph["guards"]) for graph in (old, new)]
    yield from _group_if_any("Guards", _differing_rows(*guards))
    eager = [Counter(f["reason"] for f in (*graph["fallbacks"], *graph["isolated"])) for graph in (old, new)]
    yield from _group_if_any("In eager", _differing_rows(*eager))


def _group_if_any(title: str, rows: list[list[Any]]) -> Iterable[tuple[str, list[list[Any]]]]:
    if rows:
        yield title, rows


def _differing_rows(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[list[Any]]:
    keys = dict.fromkeys((*old, *new))
    return [[key, old.get(key), new.get(key)] for key in keys if old.get(key) != new.get(key)]


def _settings(graph: dict[str, Any]) -> dict[str, str]:
    """Return the options except the report's own directory, which always differs."""
    return {name: value for name, value in graph.get("settings", {}).items() if name != "report"}


def _node_counts(graph: dict[str, Any]) -> dict[str, int]:
    return {kind: len(found["nodes"]) for kind, found in graph["graphs"].items()}


def _operator_counts(graph: dict[str, Any], kind: str) -> Counter[str]:
    nodes = graph["graphs"].get(kind, {"nodes": ()})["nodes"]
    return Counter(graph["targets"][node[_TARGET_COLUMN]] for node in nodes)


def _bytes_and_flops(graph: dict[str, Any]) -> dict[str, int]:
    found = {
        f"FLOPs, {kind}": sum(node[_FLOPS_COLUMN] for node in one["nodes"])
        for kind, one in graph["graphs"].items()
        if kind != "joint"
    }
    if graph["partition"]:
        found["bytes saved for the backward pass"] = graph["partition"]["saved_bytes"]
        found["FLOPs computed again"] = graph["partition"]["recomputed_flops"]
    return found


def _match_counts(graph: dict[str, Any]) -> Counter[str]:
    found: Counter[str] = Counter()
    for run in graph["passes"]:
        if run["changed"]:
            found[f"{run['name']} on {run['graph']}"] += run["matches"]
    return found
