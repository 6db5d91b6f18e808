"""Simulated collectives: a graph is checked by a single process.

Other ranks may check other graphs, or none, so a real collective would wait for them. And in a group of one
rank, a missing reduction, or a mean in place of a sum, would go unnoticed. So a graph with collectives runs
as several processes at once, call by call: this one, the first, and others with their own inputs. The result
of each collective follows from the values of all of them, and from the sizes and ranks of its group
(:class:`Group`): a sum over two processes that is divided by two is their mean.

Collectives are recognized by their schemas (:func:`fake.dispatch.communication.communicates`), so that those
of other libraries count, too. A graph with one that :data:`_MODELS` does not know does not run at all
(:func:`refuse_unknown`). Each model gets the arguments by name: the older namespace has the same collectives
with other arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from fake.dispatch.communication import NAMESPACES, communicates
from fake.seam.distributed_c10d import group_ranks
from fxpasses._torch import HigherOrderOperator, OpOverload
from fxpasses.checking.execution.inputs import Unsupported
from fxpasses.graphs.rewriting import subgraphs

_SAME = "is_same_in_all_processes"
_MIN_PROCESSES, _MAX_PROCESSES = 3, 4
"""Processes to run if nothing is known of the groups: as many as the largest has, within these bounds."""
_MAX_TRIED = 8

_NamedArguments = Mapping[str, Any]


@dataclass(frozen=True)
class Group:
    """The simulated processes, this one first, that stand for the members of a process group.

    All of them, if there are at most four in the job. In larger groups each stands for several, with the same
    values. Groups are those of a regular mesh, or any if nothing is known of them.

    Attributes:
        count: the number of simulated processes.
        size: of the group; ``None`` if unknown.
        rank: of this process in the group.
        stride: between members among the simulated processes, if the group is smaller than these.
    """

    count: int
    size: int | None = None
    rank: int = 0
    stride: int = 1

    def rank_of(self, process: int, size: int) -> int:
        """Return the rank in the group of one of the simulated processes.

        Args:
            process: which one.
            size: of the group, from the collective.

        Returns:
            The rank; this process, the first, has its own.
        """
        if self.size is None:
            return process % size
        if self.size >= self.count:
            return (process + self.rank) % self.count if process else self.rank
        return (process // self.stride + self.rank) % self.size

    def members(self, process: int, size: int | None = None) -> list[int]:
        """Return the processes that stand for the members of the group of a process.

        Args:
            process: which one.
            size: of the group, from the collective, if given.

        Returns:
            One per member, in order of their ranks.
        """
        if self.size is None:
            return [rank % self.count for rank in range(size or self.count)]
        if self.size >= self.count:
            return [(rank - self.rank) % self.count for rank in range(self.size)]
        here = self.rank_of(process, self.size)
        return [(process + (rank - here) * self.stride) % self.count for rank in range(self.size)]


_Model = Callable[[Sequence[Any], Sequence[_NamedArguments], Group], list[Any]]
"""Computes the result of each process from the values that they send, their other arguments, the group."""


class UnknownCollective(Unsupported):
    """An operator that communicates with other processes, and whose results cannot be simulated."""

    def __init__(self, target: Any) -> None:
        super().__init__(
            f"{target} speaks with other processes, and what they would answer cannot be made up; it is not run, since it could "
            "wait for ever"
        )
        self.target = target


def simulate_collective(target: Any, calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> list[Any]:
    """Compute the result of a collective in each of several processes.

    Args:
        target: the operator.
        calls: the arguments and keyword arguments of each process.

    Raises:
        UnknownCollective: it cannot be simulated.
    """
    model = _model(target)
    if model is None:
        raise UnknownCollective(target)
    names = [a.name for a in target._schema.arguments]
    named = [{**dict(zip(names, args, strict=False)), **kwargs} for args, kwargs in calls]
    for one in named:  # namespaces name the kind of reduction differently
        one["kind"] = one.get("reduce_op", one.get("reduceOp"))
    values = [next(one[key] for key in _INPUT_NAMES if key in one) for one in named]
    results = model(values, named, group_of(named[0], len(calls)))
    if "out" in named[0]:
        return [one["out"].copy_(result) for one, result in zip(named, results, strict=True)]
    if target._schema.name.endswith("_"):
        return [_write_result(value, result) for value, result in zip(values, results, strict=True)]
    return results


def group_of(named: _NamedArguments, count: int) -> Group:
    """Return the group of a collective.

    Args:
        named: its arguments.
        count: the number of simulated processes.
    """
    ranks = _ranks(named)
    if ranks is None or len(ranks) == 1 == dist.get_world_size() or dist.get_rank() not in ranks:
        return Group(count)
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    is_mesh = ranks == list(range(ranks[0], ranks[-1] + 1, stride)) and count % (len(ranks) * stride) == 0
    return Group(count, len(ranks), ranks.index(dist.get_rank()), stride if is_mesh else 1)


def _ranks(named: _NamedArguments) -> Sequence[int] | None:
    """The ranks of the group of a collective; ``None`` if this process does not know the group."""
    return group_ranks(named["group_name"]) if "group_name" in named else None


def count_processes(gm: fx.GraphModule) -> int:
    """Return how many processes to simulate for a graph: one if none of its own calls communicates."""
    calls = [n for n in gm.graph.nodes if n.op == "call_function" and communicates(n.target)]
    if not calls:
        return 1
    known = [ranks for ranks in map(_ranks, map(named_arguments, calls)) if ranks is not None]
    if known and dist.get_world_size() > 1:
        fits = (
            count
            for count in range(_MAX_PROCESSES, _MAX_TRIED + 1)
            if all(len(ranks) >= count or count % len(ranks) == 0 for ranks in known)
        )
        return (
            dist.get_world_size() if dist.get_world_size() <= _MAX_PROCESSES else next(fits, _MAX_PROCESSES)
        )
    sizes = [named_arguments(node).get("group_size") for node in calls]
    return min(max([_MIN_PROCESSES, *(size for size in sizes if isinstance(size, int))]), _MAX_PROCESSES)


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an operator call, by name."""
    if not isinstance(node.target, OpOverload):
        return {}
    names = [a.name for a in node.target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def mark_parameters(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Record which inputs of a graph are parameters, which are the same in all processes.

    Unless the graph gathers something: then they are shards.
    """
    is_gathered = any("all_gather" in str(node.target) for node in gm.graph.nodes)
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=False):
        node.meta[_SAME] = isinstance(value, torch.nn.Parameter) and not is_gathered


def differs_by_process(node: fx.Node) -> bool:
    """Whether an input of a graph differs between processes."""
    return not node.meta.get(_SAME, False)


def _model(target: Any) -> _Model | None:
    if not isinstance(target, OpOverload) or target.namespace not in NAMESPACES - {
        "c10d",
        "symm_mem",
    }:  # those pass handles, and memory of others
        return None
    return _MODELS.get(target._schema.name.split("::")[1].removesuffix("_").removesuffix("_out"))


def collectives(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, Any]]:
    """Yield the operators that communicate, with the calls of ``gm`` that run them.

    This includes those of subgraphs, and operators passed to a higher-order one (``with_effects``).
    """
    inside = subgraphs(gm)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            hidden = () if isinstance(node.target, OpOverload) else (*node.args, *node.kwargs.values())
            for target in (node.target, *hidden):
                if callable(target) and communicates(target):
                    yield node, target
            for value in node.all_input_nodes:
                if value.op == "get_attr" and str(value.target) in inside:
                    yield from ((node, target) for _, target in collectives(inside[str(value.target)]))


def refuse_unknown(gm: fx.GraphModule, interpreted: Collection[str] = ()) -> None:
    """Reject a graph that would really communicate with other processes if it ran for a comparison.

    Args:
        gm: the graph.
        interpreted: names of higher-order operators whose graphs also run call by call, so that their
            collectives are simulated.

    Raises:
        UnknownCollective: a collective cannot be simulated, or another higher-order operator runs it.
    """
    for node, target in collectives(gm):
        hidden = isinstance(node.target, HigherOrderOperator) and str(node.target) not in interpreted
        if hidden or _model(target) is None:
            raise UnknownCollective(target)
    for inner in subgraphs(gm).values():
        refuse_unknown(inner, interpreted)


def _write_result(value: Any, result: Any) -> Any:
    if isinstance(value, Tensor):
        return value.copy_(result)
    for one, new in zip(value, result, strict=True):
        one.copy_(new)
    return value


def _reduce(values: Sequence[Tensor], kind: str, members: Sequence[int]) -> Tensor:
    times, dtype = Counter(members), values[0].dtype
    if kind in ("sum", "avg"):
        whole = torch.stack([_sum_of_copies(values[at], times[at]) for at in times]).sum(0)
        return (whole / len(members) if kind == "avg" else whole).to(dtype)
    if kind == "product":
        powers = [values[at] if times[at] == 1 else values[at] ** times[at] for at in times]
        return torch.stack(powers).prod(0).to(dtype)
    parts = torch.stack([values[at] for at in times])
    if kind in ("min", "max"):
        return parts.amin(0) if kind == "min" else parts.amax(0)
    raise Unsupported(f"a reduction of kind {kind!r} over processes cannot be made up")


def _sum_of_copies(value: Tensor, times: int) -> Tensor:
    return value if times == 1 else value * times


def _all_reduce(values: Sequence[Tensor], named: Sequence[_NamedArguments], group: Group) -> list[Tensor]:
    return [_reduce(values, named[0]["kind"], group.members(me)) for me in range(len(values))]


def _all_gather(values: Sequence[Tensor], named: Sequence[_NamedArguments], group: Group) -> list[Tensor]:
    size = named[0]["group_size"]
    if size == 1:
        return [value.clone() for value in values]
    return [torch.cat([values[at] for at in group.members(me, size)]) for me in range(len(values))]


def _reduce_scatter(values: Sequence[Tensor], named: Sequence[_NamedArguments], group: Group) -> list[Tensor]:
    size = named[0]["group_size"]
    summed = (_reduce(values, named[0]["kind"], group.members(me)) for me in range(len(values)))
    return [whole.chunk(size)[group.rank_of(me, size)].clone() for me, whole in enumerate(summed)]


def _broadcast(values: Sequence[Tensor], named: Sequence[_NamedArguments], group: Group) -> list[Tensor]:
    # Never from the first process, whose results are compared: for it, a missing broadcast makes no
    # difference.
    return [values[-1].clone() for _ in values]


def _all_to_all(values: Sequence[Tensor], named: Sequence[_NamedArguments], group: Group) -> list[Tensor]:
    """Each process sends a part to each other one. Rows are repeated or dropped if sizes disagree."""
    return [_received_parts(values, named, group, number) for number in range(len(values))]


def _received_parts(
    values: Sequence[Tensor], named: Sequence[_NamedArguments], group: Group, me: int
) -> Tensor:
    sizes = named[me].get("output_split_sizes")
    if not sizes:  # equal parts
        count = named[me].get("group_size") or len(group.members(me))
        sizes = [values[me].shape[0] // count] * count
    found = []
    for sender, size in zip(group.members(me, len(sizes)), sizes, strict=False):
        value = values[sender]
        given = named[sender].get("input_split_sizes") or [len(value) // len(sizes)] * len(sizes)
        rows = value.split(given)[group.rank_of(me, len(given)) % len(given)]
        at = torch.arange(size, device=value.device) % max(len(rows), 1)
        found.append(rows[at] if len(rows) else value.new_zeros((size, *value.shape[1:])))
    return torch.cat(found)


def _simulate_send(value: Tensor, named: _NamedArguments) -> Tensor:
    return value.new_empty(0)  # as in PyTorch: nothing is known about a message in flight


def _simulate_receive(value: Tensor, named: _NamedArguments) -> Tensor:
    """A message. It depends on the sender and the tag, not on what was in the buffer."""
    generator = torch.Generator().manual_seed(1 + 1000 * (named["src"] % 1000) + named["tag"] % 1000)
    return (torch.randn(value.shape, generator=generator, dtype=torch.float64) * 4).to(value)


def _simulate_p2p_ops(values: Sequence[Tensor], named: _NamedArguments) -> list[Tensor]:
    rounds = zip(named["op_list"], named["peer_list"], named["tag_list"], values, strict=True)
    return [
        _simulate_receive(value, {"src": peer, "tag": tag}) if kind == "irecv" else _simulate_send(value, {})
        for kind, peer, tag, value in rounds
    ]


def _per_process(one: Callable[[Any, _NamedArguments], Any]) -> _Model:
    return lambda values, named, _: [one(value, rest) for value, rest in zip(values, named, strict=True)]


def _coalesced(one: _Model) -> _Model:
    def _each(
        values: Sequence[Sequence[Tensor]], named: Sequence[_NamedArguments], group: Group
    ) -> list[list[Tensor]]:
        results = [one(same, named, group) for same in zip(*values, strict=True)]
        return [list(mine) for mine in zip(*results, strict=True)]

    return _each


_INPUT_NAMES = ("input", "inputs", "self", "shard", "tensor", "tensors")
"""The names of a collective's input argument."""

_MODELS: dict[str, _Model] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _coalesced(_all_reduce),
    "all_gather_into_tensor": _all_gather,
    "all_gather_into_tensor_coalesced": _coalesced(_all_gather),
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": _coalesced(_reduce_scatter),
    "broadcast": _broadcast,
    "all_to_all_single": _all_to_all,
    "isend": _per_process(_simulate_send),
    "irecv": _per_process(_simulate_receive),
    "batch_p2p_ops": _per_process(_simulate_p2p_ops),
    "wait_tensor": _per_process(lambda value, _: value),
    "_wrap_tensor_autograd": _per_process(lambda value, _: value),
}
