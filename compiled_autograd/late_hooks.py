"""Hooks that user code adds to a tensor while a captured pass runs.

The engine would still call one whose node has its turn later in the pass. A captured graph has no place for it,
and must not drop it silently: the registration raises, before anything is registered.
"""

from collections.abc import Callable
from typing import Any

import torch

from compiled_autograd import _torch
from compiled_autograd.errors import LateHookError
from compiled_autograd.running import running
from compiled_autograd.schedule import edge_of

__all__ = ["register_hook", "register_post_accumulate_grad_hook"]


def register_hook(self: torch.Tensor, hook: Callable[..., Any]) -> Any:
    """``Tensor.register_hook``.

    Raises:
        LateHookError: the running captured pass has yet to compute this tensor's gradient.
    """
    _refuse_if_to_come(self)
    return _torch.register_hook(self, hook)


def register_post_accumulate_grad_hook(self: torch.Tensor, hook: Callable[..., Any]) -> Any:
    """``Tensor.register_post_accumulate_grad_hook``.

    Raises:
        LateHookError: the running captured pass has yet to accumulate this tensor's gradient.
    """
    _refuse_if_to_come(self)
    return _torch.register_post_accumulate_grad_hook(self, hook)


def _refuse_if_to_come(tensor: torch.Tensor) -> None:
    current = running.captured()
    if current is None or not tensor.requires_grad:
        return
    node, _ = edge_of(tensor)
    nodes = current.walk()
    index = next((i for i, walked in enumerate(nodes) if walked.node is node), None)
    if index is None:
        return  # a tensor of another graph, such as one that checkpointing computes again
    order = current.execution_order()
    # A node's hooks are read at once when its turn comes, so that its own are too late in eager as well.
    if order.index(index) > order.index(current.node):
        raise LateHookError(nodes[index].name, nodes[current.node].name)
