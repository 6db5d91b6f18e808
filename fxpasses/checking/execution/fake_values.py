"""Fake values, from real inputs, for a graph that was shrunk or read from a file, with or without symbols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fake import FakeTensorMode
from fxpasses._torch import DimDynamic, ShapeEnv, StatelessSymbolicContext


def propagate_fakes(gm: fx.GraphModule, inputs: Sequence[Any], dynamic: bool) -> None:
    """Compute the fake value (``meta["val"]``) of every node from real inputs.

    Args:
        gm: the graph.
        inputs: its inputs.
        dynamic: whether sizes are symbols, one for equal sizes; otherwise they are numbers.
    """
    env = ShapeEnv() if dynamic else None
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)

    def make_fake(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not dynamic:
                return mode.from_tensor(value, static_shapes=True)
            context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK] * value.dim())
            return mode.from_tensor(value, symbolic_context=context)
        if dynamic and type(value) is int and value > 1:
            return make_fake(torch.empty(value)).shape[0]  # the symbol of that size
        return value

    fakes = [make_fake(value) for value in inputs]  # outside of the mode: inside, torch.empty is fake

    class Propagate(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, fx.GraphModule):  # passed to a higher-order operator
                inner = Propagate(value)
                return lambda *args: inner.run(*args, enable_io_processing=False)
            n.meta["val"] = value
            return value

    with torch.no_grad(), mode:
        Propagate(gm).run(*fakes, enable_io_processing=False)
