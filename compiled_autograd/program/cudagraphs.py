"""Decide whether a captured backward pass can be replayed as a CUDA graph, and why not.

Eager saves the scalar operands of a forward (for example of a division by a number) as 0-dim CPU tensors. A
CUDA graph must not contain CPU tensors, but operators accept 0-dim CUDA tensors instead. So those scalars
that no user code sees are moved. Any other CPU tensor rules a CUDA graph out, and the reason names the
autograd node.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from compiled_autograd.capture.captured_steps import Kind


def _input_elements(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the tensors that the captured graph takes from ``inputs``."""
    return [
        node
        for node in graph.graph.nodes
        if node.target is operator.getitem
        and isinstance(node.args[0], fx.Node)
        and node.args[0].name == "inputs"
    ]


def _impure_user(node: fx.Node) -> fx.Node | None:
    """Return a hook, custom backward or accumulation that receives this tensor, if any."""
    for user in node.users:
        if user.meta.get("kind", Kind.PURE) is not Kind.PURE:
            return user
    return None


def liftable_scalars(graph: fx.GraphModule, inputs: Sequence[Any]) -> list[int]:
    """Return indices of 0-dim CPU tensors used only by autograd nodes; none if no input is on CUDA."""
    if not any(_is_on(tensor, "cuda") for tensor in inputs):
        return []
    return [
        node.args[1]  # type: ignore[misc]
        for node in _input_elements(graph)
        if _is_on(inputs[node.args[1]], "cpu")  # type: ignore[index]
        and inputs[node.args[1]].dim() == 0  # type: ignore[index, union-attr]
        and _impure_user(node) is None
    ]


def _is_on(tensor: Any, device_type: str) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.device.type == device_type


def lift_scalars(inputs: list[Any], indices: Sequence[int], device: torch.device) -> None:
    """Move the scalars at ``indices`` to ``device`` in place, without waiting for the copy.

    Args:
        inputs: the inputs of the graph; changed in place.
        indices: positions of 0-dim CPU tensors.
        device: the target device.
    """
    for index in indices:
        scalar = inputs[index]
        pinned = scalar.pin_memory() if device.type == "cuda" else scalar
        inputs[index] = pinned.to(device, non_blocking=True)


def skip_reason(graph: fx.GraphModule, inputs: Sequence[Any]) -> str | None:
    """Return why the pass cannot become a CUDA graph, or None if it can once its scalars are moved."""
    lifted = set(liftable_scalars(graph, inputs))
    for node in _input_elements(graph):
        index = node.args[1]
        if _is_on(inputs[index], "cpu") and index not in lifted:  # type: ignore[index]
            user = _impure_user(node) or next(iter(node.users))
            return f"{user.meta.get('autograd_node', 'the output')} uses a CPU tensor (inputs[{index}])"
    for node in graph.graph.nodes:
        kind = node.meta.get("kind", Kind.PURE)
        if kind in (Kind.PYTHON, Kind.CPP):
            what = "runs Python" if kind is Kind.PYTHON else "runs a C++ function that is not traceable"
            return f"{node.meta['autograd_node']} {what} ({node.name})"
    return None
