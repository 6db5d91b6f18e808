"""Ranks agree on what they compiled before they run it, or one of them is named.

The protocol, for each process group, and each compiled graph that has collectives in it: before its first call a rank counts itself in
at the job's key-value store, no collective being used. The first one leaves its signature for the others, who compare; the last one opens the gate.
That is five operations of the store a rank, whatever their number. Only where signatures differ do two ranks also leave everything that
decided their compilations, and the first difference is the reason that is given.

A rank that does not come is the harder case: it may still be compiling, or it runs something else and will never come. So each rank
has a thread that waits at the store for a question, and answers with what its rank does. The first one at the gate asks those who are missing. Each rank counts its
calls of graphs with collectives, by group: one that has begun the same call without coming says what it sends there, and that fits, or is the answer.

A call that sends what was accepted for the same code, symbolic sizes being what they are in this call, runs without asking: ranks may recompile alone. Where
symbolic sizes have had several values, each call is compared: which of them it is may differ between the ranks. So are calls of several functions that send the same.
"""

from __future__ import annotations

import dis
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from types import CodeType
from typing import Any

import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from fake.seam.distributed_c10d import ranks_of
from fxpasses.compiling.history import Compilation
from fxpasses.distributed import _torch
from fxpasses.distributed.answering import reaching_store
from fxpasses.distributed.collective_call import CollectiveCall, Signature, SizesOfCalls
from fxpasses.distributed.decision import decide
from fxpasses.distributed.gate import Gate, Offer, key
from fxpasses.distributed.gated_call import Known, Sends, agree, gated
from fxpasses.distributed.signature import SymbolicSizes, interleaved, names_on_every_rank, signatures
from fxpasses.errors import RankMismatchError
from fxpasses.ranks.here import HERE


class Agreement:
    """Compares what the compiled graphs of one Dynamo graph send with what other ranks' send."""

    def __init__(self, made: Compilation, inputs: Sequence[str], code: str) -> None:
        """Take down what is compiled.

        Args:
            made: everything that decides the compilation.
            inputs: the names of the Dynamo graph's inputs, in order; ``""`` for what is no tensor (symbolic sizes, meshes), which not every rank need have.
            code: which code is compiled: the same text when it is compiled again.
        """
        self._made, self._inputs, self._code = made, inputs, code
        self._function = _function(_torch.code_that_compiles())
        self._refusal: RankMismatchError | None = None
        self._agreed = False

    def saved(self, joint: fx.GraphModule, names: list[str]) -> list[str]:
        """What all ranks save for the backward pass of a joint graph: what the first of them would (``ranks="agree"``).

        Args:
            joint: the joint graph.
            names: of the nodes that this rank would save.

        Where the first rank traced another graph, or does not come, the first call raises on all ranks.
        """
        groups = signatures(joint.graph, names_on_every_rank(joint.graph, self._inputs))
        self._agreed = True
        try:
            with reaching_store(f"agree on what to save in {self._code}"):
                return decide(self._code, joint.graph, groups, names) if groups else names
        except RankMismatchError as error:
            self._refusal = error
            return names

    @contextmanager
    def compiling(self, kind: str, gm: fx.GraphModule) -> Iterator[Callable[[Any], Any]]:
        """Within, ``gm`` is compiled; gives the function that puts the gate before what came out.

        Args:
            kind: of the graph: forward, backward or inference.
            gm: as it is handed to the compiler.
        """
        names = names_on_every_rank(gm.graph, self._inputs)
        sizes = SymbolicSizes(gm.graph, names)
        handed = signatures(gm.graph, names, sizes)
        lowered: list[dict[str, Signature]] = []
        if not handed:
            yield lambda compiled: compiled
            return
        groups = {group: (key(group, ranks), ranks) for group in handed if (ranks := ranks_of(group))}
        handed = interleaved(handed, groups)
        with _torch.lowered_graphs(
            lambda graph: lowered.append(interleaved(signatures(graph, names, sizes), groups))
        ):
            # A cache gives no graph, and several are parts of one: then Inductor's own changes are not compared.
            yield lambda compiled: gated(
                Sends(
                    f"{kind} graph of {self._code}",
                    " ".join(("backward" if kind == "backward" else "forward", *self._function)),
                    _digest(self._inputs),
                    # In an order that is the same on all ranks: they would wait for one another in two groups.
                    {
                        name: (ranks, group)
                        for group, (name, ranks) in sorted(groups.items(), key=itemgetter(1))
                    },
                    handed,
                    lowered[0] if len(lowered) == 1 else {},
                    eval(sizes.of_calls(), {"SizesOfCalls": SizesOfCalls}),
                    sizes.of_calls(),
                    self._agreed,
                ),
                compiled,
                self._made,
                self._refusal,
            )


def agree_on_shards(
    model: nn.Module, mesh: DeviceMesh, dimensions: Mapping[nn.Parameter, int | None]
) -> None:
    """Compare what the ranks of a mesh are about to distribute: other parameters on one of them would hang, or give shards of something else.

    Args:
        model: whose parameters are distributed.
        mesh: over which processes.
        dimensions: of each parameter that is sharded, or None.

    Raises:
        RankMismatchError: a rank distributes something else, or does not come.
    """
    what = f"distribution of {type(model).__name__}'s parameters"
    calls = tuple(
        CollectiveCall(
            "broadcast" if dimensions[parameter] is None else "scatter",
            "" if dimensions[parameter] is None else f"dimension {dimensions[parameter]}",
            (f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)}",),
            name,
        )
        for name, parameter in model.named_parameters()
    )
    for group in mesh.get_all_groups():
        name = str(group.group_name)
        ranks = ranks_of(name)
        offer = Offer(dist.get_rank(), what, "shard", "", calls, None, {})
        known = Known(key(name, ranks), offer)
        gate = Gate(key(name, ranks), ranks, HERE.begin(key(name, ranks), offer, known.comes))
        agree(gate, offer, known, None, False)


def _function(code: CodeType | None) -> tuple[str, ...]:
    """Name and content of the function that is compiled: the same on all ranks, and each time that it is compiled."""
    if code is None:
        return ()
    name, start = _torch.goes_on(code)
    content = [
        # A plan hands the contents of cells as parameters.
        (
            one.opname.replace("DEREF", "FAST"),
            len(code.co_code) - one.argval if one.opcode in dis.hasjrel else _constant(one.argval),
        )
        for one in dis.get_instructions(code)
        if one.offset >= start and one.opname != "EXTENDED_ARG"
    ]
    return name, hashlib.sha256(repr(content).encode()).hexdigest()[:8]


def _constant(value: Any) -> str:
    if isinstance(value, CodeType):
        return value.co_name
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def _digest(names: Sequence[str]) -> str:
    return hashlib.sha256(" ".join(sorted(filter(None, names))).encode()).hexdigest()
