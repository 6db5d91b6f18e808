"""Freezing: make weights of convolutions, batch norms and matmuls constants, which Inductor folds.

Inductor also lays them out for the kernel once. Its own freezing keeps using the old weights after they
change. Here each call checks whether they did: see :class:`fxpasses.tuning.unchanged.ChangeDetector`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.compiling.options import Options
from fxpasses.graphs.rewriting import copy_graph
from fxpasses.tuning.choice import Step
from fxpasses.tuning.unchanged import ChangeDetector

log = logging.getLogger(__name__)

FREEZING = Step(
    "freezing", None, {"inductor": {"freezing": True, "cpp_wrapper": True}, "regions": "off"}, growth=1.5
)
"""The step. It turns regions off, since they take their weights as arguments.

It turns on Inductor's C++ wrapper, because a convolutional net runs many short kernels, and a frozen program
has no plan to call them. Compiling the wrapper takes half as long again.
"""

_WEIGHT_OPS = ("batch_norm", "linear", "addmm", "matmul", "mm")
"""Calls besides convolutions whose constant weights Inductor folds, or lays out for the kernel."""


def weights_to_freeze(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[int]:
    """Return the indices of a Dynamo graph's inputs that can be frozen.

    These are dense parameters and buffers in CPU memory that convolutions, batch norms or matmuls use.

    Args:
        gm: the graph.
        inputs: its inputs.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    return [
        i
        for i, (node, value) in enumerate(zip(placeholders, inputs, strict=True))
        if isinstance(value, Tensor)
        and ("_parameters_" in str(node.target) or "_buffers_" in str(node.target))
        and any(_is_weight_op(user) for user in node.users)
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and _is_dense(value)
    ]


def _is_weight_op(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", "")
    return node.op == "call_function" and (name.startswith("conv") or name in _WEIGHT_OPS)


def _is_dense(value: Tensor) -> bool:
    return value.numel() > 0 and torch.empty_like(value, device="meta").stride() == value.stride()


class FrozenProgram:
    """A graph with its weights as constants, compiled on its first call.

    Once the weights change, it is compiled with the weights as inputs.

    Args:
        gm: a Dynamo graph.
        options: options with Inductor's ``freezing``.
        compile: compiles a graph for given inputs and options.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        options: Options,
        compile: Callable[[fx.GraphModule, Sequence[Any], Options], Callable[..., Any]],
    ) -> None:
        self._gm, self._options, self._compile = gm, options, compile
        self._program: Callable[..., Any] | None = None
        self._weights: ChangeDetector | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Run the program. Args: the inputs of the graph."""
        if self._program is None:
            self._freeze(inputs)
        assert self._program is not None
        if self._weights is None:
            return self._program(*inputs)
        if not self._weights.are_unchanged(inputs):
            self._unfreeze(inputs)
            return self._program(*inputs)
        return self._program(*(inputs[i] for i in self._unfrozen))

    def _freeze(self, inputs: Sequence[Any]) -> None:
        frozen = weights_to_freeze(self._gm, inputs)
        weights = ChangeDetector(frozen, inputs)  # watch before reading them, so that no write is missed
        gm = copy_graph(self._gm)
        placeholders = gm.graph.find_nodes(op="placeholder")
        for i in frozen:
            node, name = placeholders[i], f"frozen_{i}"
            setattr(gm, name, torch.nn.Parameter(inputs[i].detach().clone(), requires_grad=False))
            with gm.graph.inserting_before(node):
                constant = gm.graph.get_attr(name)
            constant.meta.update(node.meta)
            node.replace_all_uses_with(constant)
            gm.graph.erase_node(node)
        gm.recompile()
        self._unfrozen = [i for i in range(len(inputs)) if i not in set(frozen)]
        self._program = self._compile(gm, [inputs[i] for i in self._unfrozen], self._options)
        self._weights = weights

    def _unfreeze(self, inputs: Sequence[Any]) -> None:
        log.info(
            "the weights that a program was frozen with have changed: it runs with them as inputs from now on"
        )
        inductor = {**self._options.inductor, "freezing": False}
        self._program = self._compile(self._gm, inputs, dataclasses.replace(self._options, inductor=inductor))
        self._weights = None
