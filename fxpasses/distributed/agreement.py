"""Make ranks agree on what they compiled before they run it, or name a rank that differs.

The protocol runs for each process group, and each compiled graph with collectives. Before its first call, a
rank registers at the job's key-value store, without any collective. The first rank leaves its signature for
the others, who compare; the last one opens the gate. That takes eight store operations per rank (ten for
the last one), for any number of ranks. Only if signatures differ do two ranks also leave everything that decided their compilations.
The first difference is reported as the reason.

A rank that does not come is harder: it may still be compiling, or run something else and never come. So each
rank has a thread that waits at the store for questions, and answers with the state of its rank. The first
rank at the gate asks the missing ones. Each rank counts its calls of graphs with collectives, by group. A
missing rank that has already begun the same call reports what it sends there; if that does not fit, this is
the error.

A call that sends what was accepted for the same code, with this call's symbolic sizes, runs without asking:
ranks may recompile alone. If symbolic sizes have had several values, each call is compared, because ranks may
differ in which one they have. So are calls of several functions that send the same.
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
    """Compares what the compiled graphs of one Dynamo graph send with those of other ranks."""

    def __init__(self, made: Compilation, inputs: Sequence[str], code: str) -> None:
        """Record what is compiled.

        Args:
            made: everything that decides the compilation.
            inputs: the names of the Dynamo graph's inputs, in order; ``""`` for non-tensors (symbolic sizes,
                meshes), which some ranks may lack.
            code: identifies the compiled code; the same text when it is recompiled.
        """
        self._made, self._inputs, self._code = made, inputs, code
        self._function = _function(_torch.code_that_compiles())
        self._refusal: RankMismatchError | None = None
        self._agreed = False

    def saved(self, joint: fx.GraphModule, names: list[str]) -> list[str]:
        """Return what all ranks save for a joint graph's backward: the first one's (``ranks="agree"``).

        If the first rank traced another graph, or does not come, the first call raises on all ranks.

        Args:
            joint: the joint graph.
            names: names of the nodes that this rank would save.
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
        """Compile ``gm`` inside. Yields a function that puts the gate in front of the result.

        Args:
            kind: the kind of graph: forward, backward or inference.
            gm: the graph as passed to the compiler.
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
            # A cache hit lowers no graph, and several are parts of one. Then Inductor's own changes are not
            # compared.
            yield lambda compiled: gated(
                Sends(
                    f"{kind} graph of {self._code}",
                    " ".join(("backward" if kind == "backward" else "forward", *self._function)),
                    _digest(self._inputs),
                    # In the same order on all ranks, which would otherwise wait for each other in two groups.
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
    """Compare what the ranks of a mesh are about to distribute.

    Otherwise a rank with other parameters would hang, or give shards of something else.

    Args:
        model: the model whose parameters are distributed.
        mesh: the mesh of processes.
        dimensions: the sharded dimension of each parameter, or None.

    Raises:
        RankMismatchError: if a rank distributes something else, or does not come.
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
    """Return name and content of the compiled function: equal on all ranks, and each time it is compiled."""
    if code is None:
        return ()
    name, start = _torch.original_name_and_start(code)
    content = [
        # A plan passes the contents of cells as parameters.
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
