"""Compile with regions and compare with eager: outputs, gradients, buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import fxpasses
from fxpasses.backend import fxpasses as backend
from fxpasses.regional import RepeatedSubgraph


def taken() -> list[RepeatedSubgraph]:
    """The regions of all graphs since the counters were reset."""
    return [item for report in fxpasses.stats().region_reports for item in report.taken]


def copies() -> list[int]:
    """How many copies each of them has, largest first."""
    return sorted((item.copies for item in taken()), reverse=True)


def reasons() -> str:
    """Why what was found was left in the graph, a line each."""
    return "\n".join(item.reason for report in fxpasses.stats().region_reports for item in report.left)


def compiled(model: Callable[..., Any], regions: Any = "always", **options: Any) -> Callable[..., Any]:
    """The model compiled with regions; ``compiler`` is ``"eager"`` unless given."""
    dynamic, fullgraph = options.pop("dynamic", False), options.pop("fullgraph", True)
    choice = {"compiler": "eager", "regions": regions, **options}
    return torch.compile(model, backend=backend, options=choice, dynamic=dynamic, fullgraph=fullgraph)


def check(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    regions: Any = "always",
    *,
    more: Sequence[Sequence[torch.Tensor]] = (),
    tolerance: float = 1e-5,
    **options: Any,
) -> list[int]:
    """Train one step in eager and with regions, from the same state, for each set of inputs, and compare all of it.

    Returns:
        How many copies each region has, largest first.
    """
    torch._dynamo.reset()
    fxpasses.reset_stats()
    wanted_model = copy.deepcopy(model)
    got_model = compiled(model, regions, **options)
    for given in (inputs, *more):
        torch.manual_seed(0)
        wanted, wanted_gradients = step(wanted_model, wanted_model, given)
        torch.manual_seed(0)
        got, gradients = step(got_model, model, given)
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(gradients, wanted_gradients, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(dict(model.named_buffers()), dict(wanted_model.named_buffers()))
    return copies()


def step(call: Callable[..., Any], model: nn.Module, inputs: Sequence[torch.Tensor]) -> tuple[Any, Any]:
    """Outputs and gradients (of parameters and inputs) of one step; no gradients where nothing needs one."""
    model.zero_grad(set_to_none=True)
    given = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    outputs = call(*given)
    leaves = [o for o in (outputs if isinstance(outputs, tuple) else (outputs,)) if o.requires_grad]
    if leaves:
        sum(
            (o * torch.linspace(0.5, 1.5, o.numel(), device=o.device).view(o.shape)).sum() for o in leaves
        ).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients |= {f"input {i}": x.grad for i, x in enumerate(given) if x.grad is not None}
    return outputs, gradients


def saved_bytes(
    model: nn.Module, inputs: Sequence[torch.Tensor], regions: Any = "always", **options: Any
) -> int:
    """Bytes that autograd keeps between forward and backward, parameters and inputs left out."""
    torch._dynamo.reset()
    fxpasses.reset_stats()
    output = compiled(model, regions, **options)(*inputs)
    storages = {}
    pending = [output.grad_fn]
    while pending:
        node = pending.pop()
        for tensor in getattr(node, "saved_tensors", ()):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        pending += [n for n, _ in node.next_functions if n is not None]
    for known in (*model.parameters(), *inputs):
        storages.pop(known.untyped_storage().data_ptr(), None)
    return sum(storages.values())


class Block(nn.Module):
    """A small residual layer."""

    def __init__(self, width: int = 8, eps: float = 1e-5, scale: float = 1.0, p: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=eps)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(p)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.gelu(self.up(self.norm(x)))
        return x + self.drop(self.down(y)) * self.scale


class Stack(nn.Module):
    """Layers one after the other, between an input and an output projection."""

    def __init__(self, layers: Sequence[nn.Module], width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(layers)
        self.last = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)
