"""The engine of backward passes: what it runs now, and the hooks that tensors saved for it get."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._C import _current_autograd_node as current_autograd_node

keeps_graph_in_engine: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""``retain_graph`` of the pass that torch's engine runs."""
top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def keeps_graph() -> bool:
    """``retain_graph`` of the pass that runs: a captured pass puts its own answer into torch."""
    return torch._C._autograd._get_current_graph_task_keep_graph()
