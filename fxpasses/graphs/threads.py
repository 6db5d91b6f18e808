"""Run graphs of small values on one thread, where waiting for other threads costs more than they save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, fx

from fake.seam.pytree import tree_leaves
from fxpasses.graphs.rewriting import nbytes_of, value_of

_LARGE = 1 << 15
"""Torch does not split elementwise calls on fewer elements."""


@contextmanager
def few_threads(*graphs: fx.GraphModule) -> Iterator[None]:
    """Run torch's operators on one thread in this block if all values of these graphs are small.

    Matmuls in bfloat16 and float16 would otherwise wait for other threads.

    >>> import torch
    >>> from torch import fx
    >>> with few_threads(fx.symbolic_trace(lambda x: x.sin())):
    ...     torch.get_num_threads()
    1
    """
    before = torch.get_num_threads()
    if before == 1 or not all(map(_is_small, graphs)):
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _is_small(gm: fx.GraphModule) -> bool:
    values = (value for node in gm.graph.nodes for value in tree_leaves(value_of(node)))
    return all(nbytes_of(v) < _LARGE * v.element_size() for v in values if isinstance(v, Tensor))
