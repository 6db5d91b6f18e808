"""The order of passes: as their contracts demand, otherwise as given."""

from __future__ import annotations

from collections.abc import Sequence

import networkx

from fxpasses.errors import ContractError
from fxpasses.pass_manager.pass_base import GraphKind, Pass


def check_names(passes: Sequence[Pass]) -> None:
    """Reject two different passes with the same name.

    Raises:
        ContractError: names where both are defined.
    """
    owners: dict[str, object] = {}
    for item in passes:
        owner = _definition(item)
        if (other := owners.setdefault(item.name, owner)) is not owner:
            raise ContractError(
                f"two passes are called {item.name!r}: {_describe_definition(other)} and {_describe_definition(owner)}; rename one of them "
                f"(a name of the form 'library::pass' is unlikely to be taken)",
                (item.name, item.name),
            )


def in_order(passes: Sequence[Pass], holds: Sequence[str] = ()) -> dict[GraphKind, list[Pass]]:
    """Order the passes for each kind of graph.

    Forward and backward graphs start with what holds at the end of the joint graph.

    Args:
        passes: all passes, in the given order.
        holds: properties that hold before any pass has run.

    Raises:
        ContractError: for conflicts, cycles and unmet requirements. Names the passes.
    """
    check_names(passes)
    plan: dict[GraphKind, list[Pass]] = {"joint": order_for("joint", passes, holds)}
    partitioned = sorted(_properties_after(plan["joint"], holds))
    for kind in ("forward", "backward"):
        plan[kind] = order_for(kind, passes, partitioned)  # type: ignore[index, arg-type]
    plan["inference"] = order_for("inference", passes, holds)
    return plan


def order_for(kind: GraphKind, passes: Sequence[Pass], holds: Sequence[str] = ()) -> list[Pass]:
    """Order the passes for one kind of graph: a topological sort that breaks ties by the given order.

    Args:
        kind: the kind of graph.
        passes: the passes, in the given order.
        holds: conditions that hold before the first pass runs.

    Raises:
        ContractError: see :func:`in_order`.

    >>> from fxpasses import graph_pass
    >>> late = graph_pass(lambda gm: False, name="late", requires=["early"])
    >>> early = graph_pass(lambda gm: False, name="early")
    >>> [item.name for item in order_for("joint", [late, early])]
    ['early', 'late']
    """
    chosen = [item for item in passes if kind in item.contract.graphs]
    _check_conflicts(chosen)
    constraints = networkx.DiGraph()
    constraints.add_nodes_from(range(len(chosen)))
    for position, item in enumerate(chosen):
        for needed in sorted(item.contract.requires):
            _require(constraints, chosen, position, needed, kind, needed in holds)
    _check_cycles(constraints, chosen)
    for position, item in enumerate(chosen):
        for needed in sorted(item.contract.requires):
            _keep_valid(constraints, chosen, position, needed)
    return [chosen[i] for i in networkx.lexicographical_topological_sort(constraints, key=lambda i: i)]


def _provides(item: Pass, name: str) -> bool:
    return name == item.name or name in item.contract.provides


def _invalidates(item: Pass, name: str) -> bool:
    return name in item.contract.invalidates and not _provides(item, name)


def _check_conflicts(chosen: Sequence[Pass]) -> None:
    for item in chosen:
        for other in chosen:
            if other is item:
                continue
            for name in sorted(item.contract.conflicts):
                if _provides(other, name):
                    what = "" if name == other.name else f", which provides {name!r}"
                    raise ContractError(
                        f"pass {item.name!r} conflicts with pass {other.name!r}{what}: leave one of them out",
                        (item.name, other.name),
                    )


def _require(
    constraints: networkx.DiGraph,
    chosen: Sequence[Pass],
    position: int,
    needed: str,
    kind: GraphKind,
    holds: bool,
) -> None:
    """Put the provider of ``needed`` before the pass that requires it."""
    item = chosen[position]
    providers = [i for i, other in enumerate(chosen) if i != position and _provides(other, needed)]
    if not providers:
        if holds:
            return
        raise ContractError(
            f"pass {item.name!r} requires {needed!r} on {kind} graphs, and no pass of the pipeline provides it there",
            (item.name,),
        )
    earlier = [i for i in providers if i < position]
    provider = earlier[-1] if earlier else providers[0]
    if not holds or earlier:
        reasons = (
            constraints.edges[provider, position]["why"] if constraints.has_edge(provider, position) else ()
        )
        constraints.add_edge(provider, position, why=(*reasons, needed))


def _check_cycles(constraints: networkx.DiGraph, chosen: Sequence[Pass]) -> None:
    try:
        cycle = networkx.find_cycle(constraints)
    except networkx.NetworkXNoCycle:
        return
    names = [chosen[edge[0]].name for edge in cycle]
    steps = [
        f"{chosen[b].name!r} requires {constraints.edges[a, b]['why'][0]!r}, which {chosen[a].name!r} provides"
        for a, b in (edge[:2] for edge in cycle)
    ]
    raise ContractError(f"the passes require each other: {'; '.join(steps)}", names)


def _keep_valid(constraints: networkx.DiGraph, chosen: Sequence[Pass], position: int, needed: str) -> None:
    """Keep passes that invalidate ``needed`` from running between its provider and who requires it."""
    providers = [
        i
        for i in constraints.predecessors(position)
        if needed in constraints.edges[i, position].get("why", ())
    ]
    for other, item in enumerate(chosen):
        if other == position or not _invalidates(item, needed):
            continue
        # Before the provider, or after the pass that requires it: if possible, as in the given order.
        before = [(other, provider) for provider in providers]
        after = [(position, other)]
        tries = [before, after] if before and other < before[0][1] else [after, before]
        if not any(edges and _try_edge(constraints, *edges[0]) for edges in tries):
            raise ContractError(
                f"pass {item.name!r} invalidates {needed!r}, which pass {chosen[position].name!r} requires, and has to "
                f"run between it and its provider",
                (item.name, chosen[position].name),
            )


def _try_edge(constraints: networkx.DiGraph, a: int, b: int) -> bool:
    if networkx.has_path(constraints, b, a):
        return False
    constraints.add_edge(a, b)
    return True


def _properties_after(ordered: Sequence[Pass], holds: Sequence[str]) -> set[str]:
    found = set(holds)
    for item in ordered:
        found -= set(item.contract.invalidates)
        found |= {item.name, *item.contract.provides}
    return found


def _definition(item: Pass) -> object:
    """The function, pattern or class that defines a pass."""
    return getattr(item, "function", None) or getattr(item, "pattern", None) or type(item)


def _describe_definition(owner: object) -> str:
    """The module, name and line of a definition."""
    code = getattr(owner, "__code__", None)
    line = f":{code.co_firstlineno}" if code is not None else ""
    module, name = getattr(owner, "__module__", ""), getattr(owner, "__qualname__", repr(owner))
    return f"{module}.{name}{line}"
