"""Calls of regions are traced by short rules: the graphs are those of torch's own."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from fxpasses.pipeline.stages import Stages
from fxpasses.regional import _torch, region_tracing


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + torch.dropout(self.narrow(torch.tanh(self.wide(self.norm(x)))) * mask, 0.1, self.training)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(x).triu()
        for layer in self.layers:
            x = layer(x, mask)
        return x.sum()


def _described(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_described(v) for v in value]
    if isinstance(value, torch.Tensor):
        return str(value.shape), str(value.stride()), value.dtype, value.device
    return re.sub(r"\d{6,}", "id", str(value))  # of modules


def _traced(monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> list[Any]:
    """The joint graph that calls the regions: nodes, and all that is known about each."""
    graphs = []
    partition = Stages.partition

    def recorded(self: Stages, joint: Any, *given: Any, **aot: Any) -> Any:
        if any(str(node.target).startswith("fxpasses.region") for node in joint.graph.nodes):
            graphs.append(
                [
                    (
                        node.name,
                        str(node.target),
                        str(node.args[1:]) if node.op == "call_function" else "",
                        {k: _described(v) for k, v in node.meta.items() if k not in ("from_node", "seq_nr")},
                    )
                    for node in joint.graph.nodes
                ]
            )
        return partition(self, joint, *given, **aot)

    monkeypatch.setattr(Stages, "partition", recorded)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(3, 5, 8, requires_grad=True)
    options = {"regions": "always", "compiler": "eager"}
    torch.compile(model, backend="fxpasses", dynamic=dynamic, options=options)(x).backward()
    monkeypatch.setattr(Stages, "partition", partition)
    (graph,) = graphs
    return graph


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_graph_is_the_one_that_torch_traces(monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    asked = []
    known = _torch.proxies_of

    def counting(*arguments: Any) -> Any:
        asked.append(known(*arguments))
        return asked[-1]

    monkeypatch.setattr(_torch, "proxies_of", counting)
    ours = _traced(monkeypatch, dynamic)
    assert len(asked) == 8  # forward and backward of four layers
    assert None not in asked

    # What the rules do not know goes the way of torch.
    monkeypatch.setattr(_torch, "proxies_of", lambda *arguments: None)
    monkeypatch.setattr(_torch, "FunctionalTensor", type(None))
    theirs = _traced(monkeypatch, dynamic)
    assert [node[:3] for node in ours] == [node[:3] for node in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one[3] == other[3], one[0]


def test_a_tensor_that_the_trace_does_not_know_is_left_to_torch() -> None:
    seen = []

    class Mode:
        def __torch_dispatch__(self, *arguments: Any) -> str:
            seen.append(arguments[0])
            return "torch's"

    mode = Mode()
    mode.tracer = object()  # type: ignore[attr-defined]
    given = ("key", [torch.ones(2)], [])
    assert region_tracing.trace_region_call(mode, "operator", (), given) == "torch's"
    assert region_tracing.functionalize_region_call(mode, "operator", (), given) == "torch's"
    assert seen == ["operator", "operator"]
