"""The option ``compiled_autograd``: capture the backward passes that go through a compiled graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from compiled_autograd import capture_through
from fake.seam.autograd_engine import function_of

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def with_captured_backward(
    compiled: Callable[..., Any], backend: Backend, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """``compiled``, whose backward passes are captured from its first call with gradients on.

    The class of the autograd node that a compiled graph leaves is new with each compilation, and known only
    once it has run.

    Args:
        compiled: what AOTAutograd returned for one graph.
        backend: who compiles the captured backward graphs.
        example_inputs: the graph's inputs; symbolic sizes among them are symbolic in the backward graph too.
    """
    dynamic = any(map(_is_symbolic, example_inputs))
    known = False

    def call(*inputs: Any) -> Any:
        nonlocal known
        outputs = compiled(*inputs)
        if not known and (node_class := _node_class(outputs)) is not None:
            capture_through(node_class, backend, dynamic)
            known = True
        return outputs

    return call


def _is_symbolic(value: Any) -> bool:
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _node_class(outputs: Any) -> type | None:
    """The class of the Python autograd node that computed the outputs, or the node that they are views of."""
    for output in outputs if isinstance(outputs, (list, tuple)) else [outputs]:
        node = getattr(output, "grad_fn", None)
        while node is not None:
            if function_of(type(node)) is not None:
                return type(node)
            node = node.next_functions[0][0] if node.next_functions else None
    return None
