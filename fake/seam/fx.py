"""``torch.fx``: names for making and reading graphs that need neither Dynamo nor Inductor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx
from torch._guards import detect_fake_mode
from torch._higher_order_ops.effects import has_effects
from torch.fx import graph as fx_graph
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx.operator_schemas import normalize_function


@contextlib.contextmanager
def new_nodes(gm: fx.GraphModule, made: Callable[[fx.Node], None]) -> Iterator[None]:
    """Call ``made`` with every node created in the graph of ``gm`` inside the block."""
    gm._register_create_node_hook(made)
    try:
        yield
    finally:
        gm._unregister_create_node_hook(made)


def size_hint(size: Any) -> int:
    """Return a symbolic size as an integer: its hint, or 0 if it is data-dependent."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else 0
