"""Whether a captured backward pass can be replayed as a CUDA graph, and what stands in its way.

Eager keeps the scalar operands of a forward (a division by a number, say) as 0-dim CPU tensors. A CUDA graph
may hold no CPU tensor, but operators accept a 0-dim CUDA tensor in its place: those that no user code sees can
be moved. Anything else on the CPU makes the graph unfit, and the reason names the autograd node.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from compiled_autograd.capture.captured_steps import Kind


def _elements(graph: fx.GraphModule) -> list[fx.Node]:
    """The tensors that the captured graph takes from ``inputs``."""
    return [
        node
        for node in graph.graph.nodes
        if node.target is operator.getitem
        and isinstance(node.args[0], fx.Node)
        and node.args[0].name == "inputs"
    ]


def _seen_by_user_code(node: fx.Node) -> fx.Node | None:
    """A hook, custom backward or accumulation that is given this very tensor."""
    for user in node.users:
        if user.meta.get("kind", Kind.PURE) is not Kind.PURE:
            return user
    return None


def liftable_scalars(graph: fx.GraphModule, inputs: Sequence[Any]) -> list[int]:
    """Indices of ``inputs`` that are 0-dim CPU tensors, only ever used by autograd nodes, beside CUDA tensors."""
    if not any(_is_on(tensor, "cuda") for tensor in inputs):
        return []
    return [
        node.args[1]  # type: ignore[misc]
        for node in _elements(graph)
        if _is_on(inputs[node.args[1]], "cpu")  # type: ignore[index]
        and inputs[node.args[1]].dim() == 0  # type: ignore[index, union-attr]
        and _seen_by_user_code(node) is None
    ]


def _is_on(tensor: Any, device_type: str) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.device.type == device_type


def lift_scalars(inputs: list[Any], indices: Sequence[int], device: torch.device) -> None:
    """Move the scalars at ``indices`` to ``device`` in place, without waiting for the copy.

    Args:
        inputs: the tensors that the graph gets; changed in place.
        indices: positions of 0-dim CPU tensors.
        device: where they go.
    """
    for index in indices:
        scalar = inputs[index]
        pinned = scalar.pin_memory() if device.type == "cuda" else scalar
        inputs[index] = pinned.to(device, non_blocking=True)


def skip_reason(graph: fx.GraphModule, inputs: Sequence[Any]) -> str | None:
    """Why the pass cannot become a CUDA graph; None where it can, once its scalars are lifted."""
    lifted = set(liftable_scalars(graph, inputs))
    for node in _elements(graph):
        index = node.args[1]
        if _is_on(inputs[index], "cpu") and index not in lifted:  # type: ignore[index]
            user = _seen_by_user_code(node) or next(iter(node.users))
            return f"{user.meta.get('autograd_node', 'the output')} uses a CPU tensor (inputs[{index}])"
    for node in graph.graph.nodes:
        kind = node.meta.get("kind", Kind.PURE)
        if kind in (Kind.PYTHON, Kind.CPP):
            what = "runs Python" if kind is Kind.PYTHON else "runs a C++ function that is not traceable"
            return f"{node.meta['autograd_node']} {what} ({node.name})"
    return None
