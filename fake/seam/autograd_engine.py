"""The engine of backward passes: what it runs now, and the hooks that tensors saved for it get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _current_autograd_node as current_autograd_node
from torch.autograd.graph import _engine_run_backward as run_backward

from fake.seam.dispatch import is_functorch_wrapped_tensor

keeps_graph_in_engine: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""``retain_graph`` of the pass that torch's engine runs."""
top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def keeps_graph() -> bool:
    """``retain_graph`` of the pass that runs: a captured pass puts its own answer into torch."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def autograd_node_type(name: str) -> type | None:
    """The type of the nodes of one of autograd's formulas, such as ``"MaxBackward1"``; ``None`` if this torch has none."""
    found: type | None = getattr(torch._C._functions, name, None)
    return found


def function_of(node: Any) -> Any:
    """The custom ``autograd.Function`` that a node, its class or its context belongs to; None for nodes in C++."""
    return getattr(node, "_forward_cls", None)


def saved_tensor(node: Any, name: str) -> torch.Tensor | None:
    """What a node saved for its formula, without running hooks: ``None`` if a hook packed it, or for a tensor of a transform of ``torch.func``, which is of use inside alone."""
    saved = getattr(node, f"_raw_saved_{name}", None)
    if saved is None or saved.unpack_hook is not None:
        return None
    data = saved.data
    is_own = isinstance(data, torch.Tensor) and not is_functorch_wrapped_tensor(data)
    return data if is_own else None
