"""Let one rank decide what all ranks save for the backward pass.

What is saved and what is recomputed depends on sizes and budgets, which may differ between ranks. If gathers
may be recomputed, ranks that decide differently would send different messages. So each rank adopts the
decision of its leader, the lowest rank of all groups in which the graph communicates, which has adopted that
of its own leader. On a mesh of several dimensions this ends at the mesh's first rank. Decisions are exchanged
through the job's key-value store, and cached by the structure of the joint graph: a rank that recompiles the
same structure for other sizes asks nobody.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import fx

from fake.seam.distributed_c10d import ranks_of
from fxpasses.distributed.answering import ASK_AFTER, SILENT_AFTER, STUCK_AFTER, Answering, wait_for_key
from fxpasses.distributed.gate import EagerCollectives
from fxpasses.errors import RankMismatchError
from fxpasses.ranks.here import HERE, job_store


def decide(code: str, joint: fx.Graph, groups: Iterable[str], names: list[str]) -> list[str]:
    """Return what the leader saves of a joint graph.

    Args:
        code: identifies the compiled code; the same text on all ranks.
        joint: the joint graph.
        groups: names of the process groups in which it communicates.
        names: names of the nodes that this rank would save.

    Returns:
        Names of nodes of this graph.

    Raises:
        RankMismatchError: if the leader traced another graph of the same code, or does not come.
    """
    rank_names = _names_on_every_rank(joint)
    structure = [
        f"{node.name} = {node.target}({', '.join(rank_names[n.name].partition('/')[0] for n in node.all_input_nodes)})"
        for node in joint.nodes
        if rank_names[node.name] == node.name
    ]
    digest = hashlib.sha256("\n".join(structure).encode()).hexdigest()
    if digest in HERE.decided:
        return _local_names(HERE.decided[digest], rank_names)
    Answering.ensure()
    rank = dist.get_rank()
    leader = min(min(ranks_of(group)) for group in groups)
    with HERE.lock:
        number = HERE.rounds[code] = HERE.rounds.get(code, 0) + 1
    decided = [rank_names[name] for name in names]
    if leader != rank:
        decided = _Leader(leader, code, number, structure).decision(digest)
    published = _published(rank)
    published.set(digest, json.dumps(decided))
    published.set(f"{code}/{number}", json.dumps(structure))  # for ranks that wait for another digest
    HERE.decided[digest] = decided
    return _local_names(decided, rank_names)


_OPTIONAL_CALLS = ("aten.constant_pad_nd.default", "aten.slice.Tensor")
"""Calls that a rank lacks if no-ops for its sizes: only the last shard of an uneven size is padded."""


def _names_on_every_rank(joint: fx.Graph) -> dict[str, str]:
    """Name nodes as all ranks do: pads and slices by input, as calls of a kind are counted in their names."""
    found, times = dict[str, str](), Counter[str]()
    for node in joint.nodes:
        found[node.name] = node.name
        if str(node.target) in _OPTIONAL_CALLS:
            name = f"{found[node.all_input_nodes[0].name]}/{node.target}"
            times[name] += 1
            found[node.name] = f"{name} {times[name]}"
    return found


def _local_names(decided: list[str], rank_names: Mapping[str, str]) -> list[str]:
    """Return this rank's nodes for the names: the unpadded value if this rank does not pad it."""
    own, names = {name: node for node, name in rank_names.items()}, dict[str, None]()
    for name in decided:
        while name not in own:
            name = name.rpartition("/")[0]
        names[own[name]] = None
    return list(names)


def _published(rank: int) -> Any:
    return dist.PrefixStore(f"fxpasses/decided/{rank}", job_store())


_COMPILED_NOTHING = (
    " It did not have to compile where this rank did: look for what differs between the ranks "
    "(sizes of inputs, graph breaks, branches on the rank)."
)


_NOT_ASKED = " Give options={'ranks': 'agree'} on all ranks, or on none."


class _Leader:
    """The rank whose decision this rank waits for."""

    def __init__(self, rank: int, code: str, number: int, structure: list[str]) -> None:
        self._rank, self._code, self._structure = rank, code, structure
        self._round_key = f"{code}/{number}"
        self._store = _published(rank)

    def decision(self, digest: str) -> list[str]:
        started = heard = time.monotonic()
        # With more ranks, the leader may be waiting for a third one there.
        eager = EagerCollectives(known=dist.get_world_size() == 2)
        pause = ASK_AFTER / 8
        while not wait_for_key(self._store, digest, min(pause, ASK_AFTER)):
            pause *= 2
            if self._store.check([self._round_key]) and not self._store.check([digest]):
                raise self._different_graph_error(json.loads(self._store.get(self._round_key)))
            if end := Answering.end_of(self._rank):
                raise self._missing_leader_error(end, "")
            state, now = Answering.ask(self._rank), time.monotonic()
            heard = now if state is not None else heard
            if self._waits_for_this_one(state) and not self._store.check([digest]):
                raise self._missing_leader_error(
                    "has compiled it without deciding, and waits for this rank to run it", _NOT_ASKED
                )
            if state is not None and state["running"] and state["seconds"] > STUCK_AFTER:
                raise self._missing_leader_error(
                    f"has been inside of the {state['running']} for {state['seconds']:.0f} s"
                )
            where = eager.of_all([self._rank], self._rank, state["eager"]) if state is not None else ""
            if where:
                raise self._missing_leader_error(
                    f"is inside of {where}, which is not compiled there, or with ranks='off'", _NOT_ASKED
                )
            if now - heard > SILENT_AFTER:
                raise self._missing_leader_error(
                    f"has not answered for {SILENT_AFTER:.0f} s, has ended or hangs"
                )
            if now - started > job_store().timeout.total_seconds():
                raise self._missing_leader_error(f"was waited for during {job_store().timeout}")
        return json.loads(self._store.get(digest))

    @staticmethod
    def _waits_for_this_one(state: Mapping[str, Any] | None) -> bool:
        """Whether a rank compares a call that this one has not begun, so it is already past the decision."""
        waits = state["waits"] if state is not None else None
        if waits is None or dist.get_rank() not in waits["ranks"]:
            return False
        return bool(waits["number"] >= HERE.calls[waits["key"]])

    def _missing_leader_error(self, why: str, what_then: str = _COMPILED_NOTHING) -> RankMismatchError:
        own = dist.get_rank()
        return RankMismatchError(
            f"rank {own} compiles {self._code} and waits for what rank {self._rank} decides to save (ranks='agree'); "
            f"rank {self._rank} {why}.{what_then}",
            (self._rank,),
        )

    def _different_graph_error(self, theirs: list[str]) -> RankMismatchError:
        own, graphs = dist.get_rank(), (theirs, self._structure)
        pairs = enumerate(zip(*graphs, strict=False))
        place = next((i for i, (a, b) in pairs if a != b), min(map(len, graphs)))
        first, second = (graph[place] if place < len(graph) else "the end" for graph in graphs)
        return RankMismatchError(
            f"rank {self._rank} and rank {own} traced different graphs of {self._code}: node {place} is {first!r} on rank {self._rank} and "
            f"{second!r} on rank {own}; what one saves means nothing to the other (ranks='agree')",
            (self._rank, own),
            f"node {place}",
            (first, second),
        )
