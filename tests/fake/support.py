"""Helpers shared by the tests of the fake-tensor engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._pytree import tree_leaves

import fake


def describe(value: Any, inputs: tuple[Any, ...] = ()) -> Any:
    """Everything about an output that an operator decides, as comparable data."""
    if not isinstance(value, torch.Tensor):
        return (type(value).__name__, str(value))
    if value.layout is not torch.strided:
        return (tuple(value.shape), value.dtype, str(value.device), value.layout)
    aliases = tuple(
        i
        for i, t in enumerate(inputs)
        if isinstance(t, torch.Tensor)
        and t.layout is torch.strided
        and t.untyped_storage()._cdata == value.untyped_storage()._cdata
    )
    return {
        "shape": tuple(map(str, value.shape)),
        "stride": tuple(map(str, value.stride())),
        "dtype": value.dtype,
        "device": str(value.device),
        "offset": str(value.storage_offset()),
        "nbytes": str(value.untyped_storage().nbytes()),
        "conj": value.is_conj(),
        "neg": value.is_neg(),
        "inference": value.is_inference(),
        "requires_grad": value.requires_grad,
        "keys": str(torch._C._dispatch_key_set(value)),
        "aliases": aliases,
        "same": tuple(i for i, t in enumerate(inputs) if t is value),
    }


def outcome(call: Callable[[], Any]) -> Any:
    """What a call gives: the description of its leaves, or the type of its error."""
    try:
        return [describe(leaf) for leaf in tree_leaves(call())]
    except Exception as error:  # noqa: BLE001  (the type of the error is the outcome)
        return type(error).__name__


def assert_cache_tells_apart(first: Callable[[], Any], second: Callable[[], Any]) -> None:
    """Two calls that differ: each gives, after the other, what it gives with an empty cache."""
    cold = []
    for call in (first, second):
        fake.cache_clear()
        cold.append(outcome(call))
    assert cold[0] != cold[1], "the two calls must have different answers, or the test shows nothing"
    fake.cache_clear()
    for _ in range(2):
        assert outcome(first) == cold[0]
        assert outcome(second) == cold[1]
    fake.cache_clear()
    assert outcome(second) == cold[1]
    assert outcome(first) == cold[0]


def dynamic(mode: Any, tensor: torch.Tensor, name: str = "x") -> Any:
    """A fake tensor all of whose sizes are symbolic."""
    from torch._dynamo.source import ConstantSource

    return mode.from_tensor(
        tensor,
        source=ConstantSource(name),
        symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * tensor.dim()),
    )


def symbolic_mode() -> Any:
    """A mode with a shape environment of its own."""
    return fake.FakeTensorMode(shape_env=ShapeEnv())


def structure(graph):
    """A graph without the names of its nodes (torch numbers them by symbolic arithmetic that may end up unused)."""
    places = {node: number for number, node in enumerate(graph.graph.nodes)}

    def place(argument):
        return torch.fx.node.map_aggregate(
            argument, lambda a: f"%{places[a]}" if isinstance(a, torch.fx.Node) else a
        )

    return [
        (
            n.op,
            str(n.target) if n.op == "call_function" else "",
            str(place(n.args)),
            str(place(n.kwargs)),
            _values(n),
        )
        for n in graph.graph.nodes
    ]


def _values(node):
    return [
        (tuple(map(str, v.shape)), tuple(map(str, v.stride())), v.dtype, v.device, str(v.storage_offset()))
        if isinstance(v, torch.Tensor)
        else str(v)
        for v in torch.utils._pytree.tree_leaves(node.meta.get("val"))
    ]
