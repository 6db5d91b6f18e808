"""Advice: the most useful changes to make, derived from the data of a compilation alone."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

from fxpasses.reports.versions import NODE_FIELDS

_MAX_ADVICE = 3
_TARGET_COLUMN = NODE_FIELDS.index("target")
_BREAK_REASONS = {
    "generic_jump TensorVariable()": "a branch depends on the value of a tensor",
    "step_unsupported": "Dynamo does not trace this call",
}
"""Two reasons in Dynamo's own words, and what they mean."""


class _Advice(NamedTuple):
    urgency: float
    title: str
    why: Any
    do: str
    source: str = ""


def advice(
    graphs: Sequence[dict[str, Any]],
    eager: Sequence[dict[str, Any]] = (),
    steps: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Return what to do, most urgent first, each with the place and the option that does it.

    Args:
        graphs: the data of each graph (see :mod:`fxpasses.reports.record`).
        eager: the functions that Dynamo left in eager.
        steps: measured steps, compiled and in eager (see :mod:`fxpasses.reports.step_times`).

    Returns:
        At most three of ``{"title", "why", "do", "source"}``.
    """
    found = [item for graph in graphs for item in _graph_advice(graph)]
    found += [
        item for graph in graphs if "/regions/" not in graph["name"] for item in _memory_advice(graph, graphs)
    ]
    for skipped in eager:
        place, _, function = skipped["location"].rpartition(", ")
        title = f"{function} is not compiled: it runs in eager, except for what it calls"
        how = "move what breaks the graph out of the loop, or out of the function"
        found.append(_Advice(95.0, title, skipped["reason"], how, place))
    if steps and (ratio := median(steps["compiled"]["seconds"]) / median(steps["eager"]["seconds"])) > 1:
        title = f"A compiled step takes {ratio:.2f} times as long as one in eager"
        runs_in_eager = any((graph.get("settings") or {}).get("compiler") == "eager" for graph in graphs)
        how = (
            "compiler='eager' runs the graph operator by operator, for debugging: leave it off to measure"
            if runs_in_eager
            else "options={'passes': 'tuned'} looks for what is faster; a model of small tensors may be left in eager"
        )
        found.append(_Advice(98.0, title, "measured, see Steps", how))
    found.sort(key=lambda item: -item.urgency)
    unique = {(item.title, item.source): item for item in reversed(found)}
    return [
        {"title": item.title, "why": str(item.why), "do": item.do, "source": item.source}
        for item in list(reversed(unique.values()))[:_MAX_ADVICE]
    ]


def _graph_advice(graph: dict[str, Any]) -> Iterable[_Advice]:
    raises = (graph.get("settings") or {}).get("on_failure") == "raise"
    for fallback in graph["fallbacks"]:
        yield _Advice(
            100.0,
            f"The {fallback['stage']} stage failed: "
            + ("the call raised an error" if raises else "this graph runs in eager"),
            fallback["reason"],
            "mend the cause"
            + (
                "; options={'on_failure': 'isolate'} keeps the rest compiled"
                if fallback["stage"] == "inductor"
                else ""
            ),
            fallback["location"],
        )
    for call in graph["isolated"]:
        why = call["reason"]
        yield _Advice(
            90.0,
            f"{call['target']} runs in eager",
            why,
            "use an operator that Inductor lowers",
            call["source"],
        )
    for guard in graph["guards"]:
        where = guard.get("where")
        avoid = guard.get("avoid", "")
        if (
            avoid and where and not avoid.startswith("nothing ")
        ):  # a line of the user's code caused it, and can be changed
            title = f"Sizes are restricted: {guard['expression']}"
            yield _Advice(60.0, title, guard["why"], avoid, f"{where['file']}:{where['line']}")
    graph_break, recompilation = graph.get("ended"), graph.get("recompiled")
    if graph_break:
        where = graph_break["where"] or {"file": "", "line": 0, "code": ""}
        reason, *more = _BREAK_REASONS.get(
            graph_break["reason"], graph_break["reason"]
        ).strip().splitlines() or [""]
        hints = [line.partition("Hint:")[2].strip() for line in more if "Hint:" in line]
        default_hint = "what is before and after it is compiled apart; torch.compile(..., fullgraph=True) tells how to avoid it"
        yield _Advice(
            70.0,
            f"The graph ends here: {reason}",
            where["code"],
            " ".join(hints) or default_hint,
            f"{where['file']}:{where['line']}" if where["file"] else "",
        )
    if recompilation:
        yield _Advice(
            65.0,
            f"Compiled again: {recompilation['reason'].partition(' # ')[0] or 'another guard failed'}",
            "; ".join(recompilation["differs"]) or recompilation["reason"].partition(" # ")[2],
            _recompilation_hint(recompilation),
        )
    yield from _compile_time_advice(graph)


def _recompilation_hint(recompilation: dict[str, Any]) -> str:
    if "size mismatch" in recompilation["reason"]:
        return "torch._dynamo.mark_dynamic(tensor, dim) or dynamic=True from the first call, if it is a size that changes"
    if "0/1 specialization" in recompilation["reason"]:
        return "sizes 0 and 1 get graphs of their own; where they are frequent, torch._dynamo.decorators.mark_unbacked(tensor, dim)"
    if ".size()" in recompilation["reason"]:
        return "the graph before holds for other sizes only; its guards (in Sizes) tell who asked for that, and how to avoid it"
    return "keep what the guard reads as it was in the call before, or pass it as a tensor"


def _memory_advice(graph: dict[str, Any], graphs: Sequence[dict[str, Any]]) -> Iterable[_Advice]:
    partition = graph["partition"]
    if not partition or partition["memory_budget"] < 1 or partition["saved_bytes"] < 1_000_000:
        return
    by_line: Counter[tuple[str, int, str]] = Counter()
    for part, copies in _iter_with_regions(graph, graphs):
        saved = (part["partition"] or {"saved": ()})["saved"]
        sizes = {name: size for name, size, _, kind, _ in saved if kind == "activation"}
        nodes = part["graphs"].get("forward", {"nodes": ()})["nodes"]
        for row in nodes:
            node = dict(zip(NODE_FIELDS, row, strict=True))
            called = nodes[node["inputs"][0]] if part["targets"][node["target"]] == "getitem" else row
            of_region = part["targets"][called[_TARGET_COLUMN]].startswith("fxpasses.region_")
            if node["name"] in sizes and node["line"] >= 0 and not of_region:
                file, number, _, code = part["lines"][node["line"]]
                by_line[file, number, code] += copies * sizes[node["name"]]
    if not by_line:
        return
    (file, number, code), size = by_line.most_common(1)[0]
    yield _Advice(
        30.0 + 20.0 * size / max(1, partition["saved_bytes"]),
        f"{size / 1e6:.1f} of {partition['saved_bytes'] / 1e6:.1f} MB of activations are saved for one line",
        code,
        "options={'memory_budget': 0.5} computes some of them again in the backward pass",
        f"{file}:{number}",
    )


def _iter_with_regions(
    graph: dict[str, Any], graphs: Sequence[dict[str, Any]], copies: int = 1
) -> Iterable[tuple[dict[str, Any], int]]:
    """Yield a graph and the graphs of its regions, each with its number of copies."""
    yield graph, copies
    inner = [part for part in graphs if part["name"].rpartition("/regions/")[0] == graph["name"]]
    taken = [item["copies"] for item in (graph["regions"] or {}).get("repeats", ()) if item["taken"]]
    for part, times in itertools.zip_longest(inner, taken[: len(inner)], fillvalue=1):
        yield from _iter_with_regions(part, graphs, copies * times)  # type: ignore[arg-type]


def _compile_time_advice(graph: dict[str, Any]) -> Iterable[_Advice]:
    stages = graph["seconds"]["stages"]
    total = sum(stages.values())
    left = [item for item in (graph["regions"] or {}).get("repeats", ()) if not item["taken"]]
    left = [item for item in left if item["saved_seconds"] > 2]
    if left:
        best = max(left, key=lambda item: item["saved_seconds"])
        yield _Advice(
            50.0,
            f"{best['copies']} copies of {best['calls']} calls are compiled one by one",
            best["reason"],
            f"options={{'regions': 'always'}} saves about {best['saved_seconds']:.0f} s of compile time"
            + (f", and {best['costs']}" if best.get("costs") else ""),
        )
    slow = [run for run in graph["passes"] if run["seconds"] + run["check_seconds"] > 0.1 * max(total, 5.0)]
    for run in slow:
        seconds = run["seconds"] + run["check_seconds"]
        yield _Advice(
            20.0,
            f"The pass {run['name']} takes {seconds:.1f} s on the {run['graph']} graph",
            "changed the graph" if run["changed"] else "found nothing to do",
            "leave it out of options={'passes': [...]} if what it gains is not worth that",
        )
