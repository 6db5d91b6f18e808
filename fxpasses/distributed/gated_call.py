"""Gate calls of a compiled graph with collectives: first, the ranks of each group compare what they send.

This does not depend on the compiler: graphs of plans use it, too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from fake.seam.distributed_c10d import group_ranks, ranks_of
from fxpasses.distributed.answering import Answering, note_absent_ranks, reaching_store
from fxpasses.distributed.collective_call import CollectiveCall, Signature, SizesOfCalls
from fxpasses.distributed.gate import Gate, Offer
from fxpasses.distributed.watching import Watch
from fxpasses.errors import RankMismatchError
from fxpasses.ranks.here import HERE

if TYPE_CHECKING:
    from fxpasses.compiling.history import Compilation


@dataclasses.dataclass
class Sends:
    """What a compiled graph sends, call by call.

    Attributes:
        what: the graph, in words.
        function: the function it was compiled from, as named on every rank.
        inputs: digest of the names of the Dynamo graph's inputs.
        groups: by the key of a process group, its ranks and its name in this rank's graph.
        handed: the collectives as passed to the compiler, by that name.
        lowered: the same after the compiler's passes, if known.
        sizes: the symbolic sizes among them.
        sizes_code: code that recreates these.
        agreed: whether the ranks have agreed on what the graph saves. One that is not compiled anew would not
            take part in that.
    """

    what: str
    function: str
    inputs: str
    groups: Mapping[str, tuple[Sequence[int], str]]
    handed: Mapping[str, Signature]
    lowered: Mapping[str, Signature]
    sizes: SizesOfCalls
    sizes_code: str
    agreed: bool = False

    def __post_init__(self) -> None:
        self._offers: dict[tuple[int, ...], dict[str, Offer]] = {}

    def code(self, compiled: str) -> str:
        """Return the code with which a plan gates a graph (:func:`gated_graph`). Args: the graph's name."""
        calls = [
            {group: [dataclasses.astuple(call) for call in signature] for group, signature in found.items()}
            for found in (self.handed, self.lowered)
        ]
        return f"gated_graph({compiled}, {(self.what, self.function, self.inputs, self.groups, *calls)!r}, {self.sizes_code})"

    def of_call(self, inputs: Sequence[Any]) -> dict[str, Offer]:
        """Return what a call with these inputs sends, by the key of the group."""
        values = self.sizes.of_call(inputs)
        if values not in self._offers:
            self._offers[values] = {
                key: Offer(
                    dist.get_rank(),
                    self.what,
                    self.function,
                    self.inputs,
                    self.sizes.at(self.handed[group], values),
                    self.sizes.at(self.lowered[group], values) if group in self.lowered else None,
                    self.sizes.named(values),
                )
                for key, (_, group) in self.groups.items()
            }
        return self._offers[values]


def gated(
    sends: Sends, compiled: Any, made: Compilation | None = None, refusal: RankMismatchError | None = None
) -> Any:
    """Put the gate in front of a compiled graph.

    Args:
        sends: what its calls send.
        compiled: takes a list of inputs.
        made: what decided its compilation, if it was compiled anew.
        refusal: why no rank may pass, if that is known.

    Returns:
        A callable like ``compiled`` that raises :class:`fxpasses.RankMismatchError` if the ranks do not fit.
    """

    def run(inputs: Any) -> Any:
        nonlocal made
        offers = sends.of_call(inputs)
        known = {key: Known(key, offer) for key, offer in offers.items()}
        numbers = {key: HERE.begin(key, offer, known[key].comes) for key, offer in offers.items()}
        if refusal is not None:
            for key, (ranks, _) in sends.groups.items():
                Gate(key, ranks, numbers[key]).refuse(refusal)
            raise refusal
        for key, offer in offers.items():
            gate = Gate(key, sends.groups[key][0], numbers[key])
            agree(gate, offer, known[key], made, sends.sizes.any)
        made = None  # after the first call, a difference is not explained by the compilation
        before, HERE.since = (HERE.running, HERE.inside), time.monotonic()
        HERE.running = sends.what
        HERE.inside = tuple(
            (key, tuple(ranks), numbers[key]) for key, (ranks, _) in sends.groups.items() if len(ranks) > 1
        )
        if HERE.inside:
            Watch.ensure()
        try:
            return compiled(inputs)
        except RuntimeError as error:
            for key, (ranks, _) in sends.groups.items():
                note_absent_ranks(error, key, ranks)
            raise
        finally:
            HERE.running, HERE.inside = before

    run._boxed_call = True  # type: ignore[attr-defined]
    run.called = [compiled]  # type: ignore[attr-defined]
    run.sends = sends  # type: ignore[attr-defined]
    return run


class Known:
    """What was compared before, of what a call sends to a group.

    Attributes:
        code: the group and the graph, in words.
        alike: the group and what is sent.
        accepted: what was compared for that code.
        fits: whether this call's was.
        exchangeable: whether other functions, or graphs of this one, send the same.
        comes: whether this call is compared, because it may differ from other ranks' calls.
    """

    def __init__(self, key: str, offer: Offer) -> None:
        """Args: the name of the group on all ranks, and what is sent."""
        self.code = key, offer.what
        self.alike = key, f"{offer.function.partition(' ')[0]}: {offer.sent}"
        self.accepted = HERE.accepted.setdefault(self.code, {})
        self.fits = offer.fits_one_of(self.accepted)
        self.exchangeable = not {self.alike, self.code}.isdisjoint(HERE.exchangeable)
        varies = self.code in HERE.varying and len(self.accepted) > 1
        self.comes = not self.fits or self.exchangeable or varies


def agree(gate: Gate, offer: Offer, known: Known, made: Compilation | None, symbolic: bool) -> None:
    """Come to the gate if this call may differ from other ranks' calls.

    Args:
        gate: the gate of this call, for one group.
        offer: what it sends there.
        known: what was compared of that before.
        made: what decided the compilation, if this is the graph's first call.
        symbolic: whether the graph has collectives of symbolic sizes.
    """
    if not known.comes or len(gate.ranks) < 2 or not dist.is_initialized():
        return
    code, alike, accepted = known.code, known.alike, known.accepted
    functions, graphs = HERE.functions.setdefault(alike, set()), HERE.graphs.setdefault(code, set())
    with reaching_store(f"compare the {offer.what} with the other ranks'"):
        if known.fits and gate.all_send(offer, known.exchangeable):
            return
        Answering.ensure()
        HERE.waits = gate.waits(offer)
        functions.add(offer.function)
        # Symbolic sizes alone may differ in each call of a graph.
        others = bool(graphs - {offer.graph}) or (not symbolic and bool(accepted.keys() - {offer.digests[0]}))
        offer = dataclasses.replace(
            offer, functions=tuple(sorted(functions)), graphs=tuple(sorted(graphs)), has_others=others
        )
        try:
            opened = gate.come(offer, made, symbolic)
        finally:
            HERE.waits = None
    accepted.update([offer.digests])
    graphs.add(offer.graph)
    if opened.symbolic:
        HERE.varying.add(code)
    if opened.exchangeable and not known.fits:
        HERE.exchangeable.update((alike, code) if others else (alike,))
    elif not opened.as_before:
        # What was compared before, and is now sent another way, would be asked about in each call.
        HERE.exchangeable.difference_update((alike, code))


def gated_graph(compiled: Any, told: Sequence[Any], sizes: SizesOfCalls) -> Any:
    """Put the gate in front of a graph of a plan.

    Args:
        compiled: takes a list of inputs.
        told: what :meth:`Sends.code` has written.
        sizes: the symbolic sizes.

    Raises:
        ImportError: if the process groups of this job differ.
    """
    what, function, inputs, groups, *calls = told
    kind = what.partition(" of ")[0]  # frames are numbered differently in each process
    what = f"{kind} of plan {hashlib.sha256(repr(told).encode()).hexdigest()[:8]}"
    for ranks, name in groups.values():
        if group_ranks(name) is None or ranks_of(name) != list(ranks):
            raise ImportError(f"process group {name} is not that of the ranks {ranks}")
    handed, lowered = (
        {name: tuple(CollectiveCall(*call) for call in signature) for name, signature in found.items()}
        for found in calls
    )
    return gated(Sends(what, function, inputs, groups, handed, lowered, sizes, ""), compiled)
