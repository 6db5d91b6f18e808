"""The ``compiled_autograd`` option: capture the backward passes that go through a compiled graph."""

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
    """Capture the backward passes of ``compiled``, starting with its first call with gradients enabled.

    The class of a compiled graph's autograd node is new with each compilation, and known only after the graph
    has run.

    Args:
        compiled: AOTAutograd's result for one graph.
        backend: compiles the captured backward graphs.
        example_inputs: the graph's inputs. Sizes that are symbolic here are symbolic in the backward graph,
            too.
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
    """The class of the Python autograd node that computed the outputs or their view base."""
    for output in outputs if isinstance(outputs, (list, tuple)) else [outputs]:
        node = getattr(output, "grad_fn", None)
        while node is not None:
            if function_of(type(node)) is not None:
                return type(node)
            node = node.next_functions[0][0] if node.next_functions else None
    return None
