"""A captured backward pass in the cache: its graph, and what compilers made of it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from compiled_autograd.hook import Capture
from compiled_autograd.session import Session
from compiled_autograd.steps import CapturedNode, Kind

__all__ = ["CapturedGraph"]


class CapturedGraph:
    """One entry of the C++ cache. C++ wants it callable, and hands it back on every hit."""

    def __init__(self, capture: Capture, nodes: Sequence[CapturedNode], module: fx.GraphModule) -> None:
        self.nodes = tuple(nodes)
        self.module = module
        self.num_outputs = len(capture.outputs)
        self.needs_engine = any(step.target is _CPP_HOOK for node in nodes for step in node.steps)
        self.title = f"{len(self.nodes)} autograd nodes"
        self.has_python = any(step.kind is not Kind.PURE for node in nodes for step in node.steps)

    def __call__(self, *arguments: Any) -> Any:
        return self.module(*arguments)

    def run(self, session: Session, arguments: tuple[Any, ...]) -> Sequence[Any]:
        """The gradients; ``arguments`` as C++ gave them."""
        return self.module.forward(*arguments)

    def run_here(self, arguments: tuple[Any, ...]) -> Sequence[Any]:
        """Run the graph as it is, for a caller that is not one of our sessions."""
        return self.module.forward(*arguments)


from compiled_autograd.functional import call_cpp_pre_hook as _CPP_HOOK  # noqa: E402
