"""The autograd engine: the node that it is running, and hooks for saved tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _current_autograd_node as current_autograd_node
from torch.autograd.graph import _engine_run_backward as run_backward

from fake.seam.dispatch import is_functorch_wrapped_tensor

keeps_graph_in_engine: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Returns ``retain_graph`` of the backward pass that torch's engine is running."""
top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def keeps_graph() -> bool:
    """Return ``retain_graph`` of the running backward pass;
    a captured pass puts its own function into torch."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def autograd_node_type(name: str) -> type | None:
    """Return the type of an autograd formula's nodes, such as ``"MaxBackward1"``;
    ``None`` if this torch has none."""
    found: type | None = getattr(torch._C._functions, name, None)
    return found


def function_of(node: Any) -> Any:
    """Return the custom ``autograd.Function`` of a node, its class or its context; None for C++ nodes."""
    return getattr(node, "_forward_cls", None)


def saved_tensor(node: Any, name: str) -> torch.Tensor | None:
    """Return a node's saved tensor without running hooks. ``None`` if a hook packed it, or for a tensor of a
    ``torch.func`` transform, which is usable only inside that transform."""
    saved = getattr(node, f"_raw_saved_{name}", None)
    if saved is None or saved.unpack_hook is not None:
        return None
    data = saved.data
    is_own = isinstance(data, torch.Tensor) and not is_functorch_wrapped_tensor(data)
    return data if is_own else None
