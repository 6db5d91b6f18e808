"""Simulated collectives: a graph is checked by one process alone.

The others may look at other graphs, or at none, so that a real collective would wait for them. And in a group of one
process a reduction that is left out, or a mean for a sum, cannot be seen. So each run behaves as if there were three
processes, of which the others hold multiples of what this one, the first, holds.

Which operators these are is read from their schemas (:func:`fxpasses.graphs.communication.communicates`), so that those of other libraries count, too. A
graph with one that :data:`_MODELS` cannot make up is not run at all (:func:`refuse_unknown`). Each model gets the
arguments by name: the older namespace has the same collectives with other arguments. A model only knows what this
process holds, so that a sum that is scattered and then gathered is not the sum: a rewrite of one kind of collective
into others cannot be judged, and its pass should declare ``numerics="none"``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses._torch import HigherOrderOperator, OpOverload
from fxpasses.checking.inputs import Unsupported
from fxpasses.graphs.communication import NAMESPACES, communicates
from fxpasses.graphs.rewriting import subgraphs

_OTHERS = (0.5, -2.0)
"""The values of the other ranks, as multiples: integers are multiplied and rounded."""

_Named = Mapping[str, Any]


class UnknownCollective(Unsupported):
    """An operator that speaks with other processes, and of which nothing here knows what they would answer."""

    def __init__(self, target: Any) -> None:
        super().__init__(
            f"{target} speaks with other processes, and what they would answer cannot be made up; it is not run, since it could "
            "wait for ever"
        )
        self.target = target


@functools.cache
def simulated(target: Any) -> Any:
    """The function that a run calls instead of a collective; any other operator is called itself.

    The answer to a collective that cannot be made up raises :class:`UnknownCollective`.
    """
    if not communicates(target):
        return target
    model = _model(target)

    def made_up(*args: Any, **kwargs: Any) -> Any:
        if model is None:
            raise UnknownCollective(target)
        named = {**dict(zip((a.name for a in target._schema.arguments), args, strict=False)), **kwargs}
        # Several namespaces, several names for the value that is sent and for the kind of reduction.
        value = next(named[key] for key in _VALUES if key in named)
        result = model(value, {**named, "kind": named.get("reduce_op", named.get("reduceOp"))})
        if "out" in named:
            return named["out"].copy_(result)
        return _written(value, result) if target._schema.name.endswith("_") else result

    return made_up


def _model(target: Any) -> Callable[[Any, _Named], Any] | None:
    if not isinstance(target, OpOverload) or target.namespace not in NAMESPACES - {
        "c10d",
        "symm_mem",
    }:  # those hand over handles, and memory of others
        return None
    return _MODELS.get(target._schema.name.split("::")[1].removesuffix("_").removesuffix("_out"))


def collectives(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, Any]]:
    """The operators that speak with other processes, with the calls of ``gm`` that run them.

    Those of graphs inside count, and operators that a higher-order one is given (``with_effects``).
    """
    inside = subgraphs(gm)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            for target in (node.target, *node.args, *node.kwargs.values()):
                if callable(target) and communicates(target):
                    yield node, target
            for value in node.all_input_nodes:
                if value.op == "get_attr" and str(value.target) in inside:
                    yield from ((node, target) for _, target in collectives(inside[str(value.target)]))


def refuse_unknown(gm: fx.GraphModule, interpreted: Collection[str] = ()) -> None:
    """Refuse a graph that would really speak with other processes when it is run for a comparison.

    Args:
        gm: the graph.
        interpreted: names of higher-order operators whose graphs are run call by call, too, so that their collectives are made up.

    Raises:
        UnknownCollective: for a collective that cannot be made up, or that another higher-order operator runs.
    """
    for node, target in collectives(gm):
        hidden = isinstance(node.target, HigherOrderOperator) and str(node.target) not in interpreted
        if hidden or _model(target) is None:
            raise UnknownCollective(target)
    for inner in subgraphs(gm).values():
        refuse_unknown(inner, interpreted)


def _written(value: Any, result: Any) -> Any:
    if isinstance(value, Tensor):
        return value.copy_(result)
    for one, new in zip(value, result, strict=True):
        one.copy_(new)
    return value


def _times(value: Tensor, factor: float) -> Tensor:
    return (value * factor).to(value.dtype)


def _held(value: Tensor) -> list[Tensor]:
    return [value, *(_times(value, factor) for factor in _OTHERS)]


def _reduced(value: Tensor, kind: str) -> Tensor:
    parts = torch.stack(_held(value))
    if kind == "sum":
        return parts.sum(0).to(value.dtype)
    if kind == "avg":
        return (parts.sum(0) / len(parts)).to(value.dtype)
    if kind in ("min", "max"):
        return parts.amin(0) if kind == "min" else parts.amax(0)
    if kind == "product":
        return parts.prod(0).to(value.dtype)
    raise Unsupported(f"a reduction of kind {kind!r} over processes cannot be made up")


def _all_reduce(value: Tensor, named: _Named) -> Tensor:
    return _reduced(value, named["kind"])


def _all_gather(value: Tensor, named: _Named) -> Tensor:
    return torch.cat([_times(value, 1 + k) for k in range(named["group_size"])])


def _reduce_scatter(value: Tensor, named: _Named) -> Tensor:
    return _reduced(value.chunk(named["group_size"])[0], named["kind"])


def _broadcast(value: Tensor, named: _Named) -> Tensor:
    return _times(value, _OTHERS[0])


def _all_to_all(value: Tensor, named: _Named) -> Tensor:
    """Each process sends the rows that this one keeps for itself, again and again until there are enough, times its number."""
    sizes = named.get("output_split_sizes")
    if not sizes:  # equal parts
        count = named["group_size"]
        sizes = [value.shape[0] // count] * count
    given = named.get("input_split_sizes") or [value.shape[0] // len(sizes)]
    own = value[: given[0]] if given[0] else value
    rows = [torch.arange(size, device=value.device) % max(own.shape[0], 1) for size in sizes]
    if not own.shape[0]:
        return value.new_zeros((sum(sizes), *value.shape[1:]))
    return torch.cat([_times(own[at], 1 + k) for k, at in enumerate(rows)])


def _sent(value: Tensor, named: _Named) -> Tensor:
    return value.new_empty(0)  # as torch's: there is nothing to know about a message that is on its way


def _received(value: Tensor, named: _Named) -> Tensor:
    """A message: it depends on who sends which one, and not on what was in the buffer."""
    generator = torch.Generator().manual_seed(1 + 1000 * (named["src"] % 1000) + named["tag"] % 1000)
    return (torch.randn(value.shape, generator=generator, dtype=torch.float64) * 4).to(value)


def _both_ways(values: Sequence[Tensor], named: _Named) -> list[Tensor]:
    rounds = zip(named["op_list"], named["peer_list"], named["tag_list"], values, strict=True)
    return [
        _received(value, {"src": peer, "tag": tag}) if kind == "irecv" else _sent(value, {})
        for kind, peer, tag, value in rounds
    ]


def _itself(value: Tensor, named: _Named) -> Tensor:
    return value


def _several(one: Callable[[Tensor, _Named], Tensor]) -> Callable[[Any, _Named], list[Tensor]]:
    return lambda values, named: [one(value, named) for value in values]


_VALUES = ("input", "inputs", "self", "shard", "tensor", "tensors")
"""The names of the collectives' input argument."""

_MODELS: dict[str, Callable[[Any, _Named], Any]] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _several(_all_reduce),
    "all_gather_into_tensor": _all_gather,
    "all_gather_into_tensor_coalesced": _several(_all_gather),
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": _several(_reduce_scatter),
    "broadcast": _broadcast,
    "all_to_all_single": _all_to_all,
    "isend": _sent,
    "irecv": _received,
    "batch_p2p_ops": _both_ways,
    "wait_tensor": _itself,
    "_wrap_tensor_autograd": _itself,
}
