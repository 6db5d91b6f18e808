"""Prove in exact arithmetic that AOTAutograd's graph is the function of eager's own operators.

Eager is the program of Dynamo's graph, run once with autograd and recorded operator by operator. Nothing is
decomposed in it, so that every decomposition is checked by the rules for the operator that it replaces.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fake.seam.pytree import tree_leaves
from fxpasses._torch import outside_tracing, trace_calls
from fxpasses.checking.execution.inputs import Unsupported, cloned, is_tangent, make_tangents, placeholders
from fxpasses.checking.execution.interpret import RUN_ERRORS, allocates
from fxpasses.compiling.observing import Observer
from fxpasses.compiling.options import Options
from fxpasses.exact import Verdict, equivalent
from fxpasses.graphs.aliasing import is_mutating, uses_rng
from fxpasses.graphs.rewriting import copy_graph

log = logging.getLogger(__name__)
aten = torch.ops.aten

_MAX_ELEMENTS = 2_000_000
"""Elements of inputs: what is computed from them is evaluated exactly, at twenty times the model's cost."""


class CaptureCheck(Observer):
    """Checks the captured graphs of a compilation, each on the inputs of its first call.

    Attributes:
        verdicts_found: one for each graph that can be judged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.verdicts_found: list[Verdict] = []
        self._waiting: list[tuple[fx.GraphModule, fx.GraphModule]] = []
        self._dynamo: fx.GraphModule | None = None

    def dynamo(self, gm: fx.GraphModule, options: Options, earlier: Any = None) -> None:
        """Keep a copy of Dynamo's graph. Args: those of :meth:`.Observer.dynamo`."""
        self._dynamo = copy_graph(gm)

    def joint(self, gm: fx.GraphModule) -> None:
        self._keep(gm)

    def graph(self, kind: str, gm: fx.GraphModule) -> None:
        if kind == "inference":
            self._keep(gm)

    def _keep(self, gm: fx.GraphModule) -> None:
        if self._dynamo is not None:
            self._waiting.append((self._dynamo, copy_graph(gm)))
        self._dynamo = None

    def wrap_compiled(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``compiled`` so that its graph is checked on the first call."""
        if not self._waiting:
            return compiled
        waiting = [self._waiting.pop()]

        def run(*args: Any) -> Any:
            if waiting:
                self._judge(*waiting.pop(), args)
            return compiled(*args)

        return run

    def _judge(self, eager: fx.GraphModule, captured: fx.GraphModule, args: Sequence[Any]) -> None:
        try:
            with outside_tracing():
                values = _make_inputs(captured, args)
                recorded = _record_eager(eager, args, values)
                for mine, theirs in zip(placeholders(recorded), placeholders(captured), strict=True):
                    mine.name = theirs.name  # values written to inputs are named by them
                self.verdicts_found.append(equivalent(recorded, captured, values))
        except (Unsupported, *RUN_ERRORS) as reason:
            log.info("a captured graph is not judged in exact arithmetic: %s", reason)


def _make_inputs(captured: fx.GraphModule, args: Sequence[Any]) -> list[Any]:
    """Make inputs of the captured graph, with random gradients of outputs."""
    nodes = placeholders(captured)
    gradients = [node for node in nodes if is_tangent(node)]
    if len(nodes) - len(gradients) != len(args) or nodes[len(args) :] != gradients:
        raise Unsupported("the captured graph takes other inputs than Dynamo's")
    if sum(v.numel() for v in args if isinstance(v, Tensor)) > _MAX_ELEMENTS or allocates(captured):
        raise Unsupported("it is too large, or holds uninitialised memory")
    given = [v if isinstance(v, (Tensor, int, float)) else int(v) for v in args]
    bound = {
        n.meta["val"].node.expr: v
        for n, v in zip(nodes, given, strict=False)
        if type(v) is int and isinstance(n.meta["val"], torch.SymInt)
    }
    made = make_tangents(gradients, bound, "random", torch.Generator().manual_seed(0))
    return [*cloned(given), *made]


def _record_eager(eager: fx.GraphModule, args: Sequence[Any], values: Sequence[Any]) -> fx.GraphModule:
    """Record the ATen operators of Dynamo's graph in eager, including the backward pass, as a joint graph.

    Raises:
        Unsupported: eager has other outputs that require gradients, or draws random numbers in place.
    """
    needs_grad = [isinstance(v, Tensor) and v.requires_grad for v in args]
    tensors = [i for i, v in enumerate(values) if isinstance(v, Tensor)]

    def step(*given: Tensor) -> list[Any]:
        filled = list(values)
        for i, value in zip(tensors, given, strict=True):
            filled[i] = value
        leaves = [
            v.detach().requires_grad_() if want else v for v, want in zip(filled, needs_grad, strict=False)
        ]
        with torch.enable_grad():
            results = list(tree_leaves(eager(*leaves)))
        differentiable = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
        if len(differentiable) != len(values) - len(args):
            raise Unsupported("the captured graph has other outputs that want gradients")
        if not differentiable:
            return results
        grad_inputs = [v for v, want in zip(leaves, needs_grad, strict=True) if want]
        found = iter(torch.autograd.grad(differentiable, grad_inputs, filled[len(args) :], allow_unused=True))
        return [*results, *(next(found) if want else None for want in needs_grad)]

    recorded = trace_calls(step, [values[i] for i in tensors], {}, guards=False)
    _declare_batch_norm_writes(recorded)
    if any(map(is_mutating, recorded.graph.nodes)):  # then write at the end, as the captured graph does
        if any(map(uses_rng, recorded.graph.nodes)):
            raise Unsupported("eager draws random numbers in place")
        functional = torch.func.functionalize(recorded, remove="mutations")
        recorded = trace_calls(functional, cloned([values[i] for i in tensors]), {}, guards=False)
    taken, first = placeholders(recorded), next(iter(recorded.graph.nodes))
    for i in reversed(range(len(values))):  # the recorded graph has numbers for sizes
        if i in tensors:
            first = taken.pop()
        else:
            with recorded.graph.inserting_before(first):
                first = recorded.graph.placeholder(f"size_{i}")
    return recorded


def _declare_batch_norm_writes(recorded: fx.GraphModule) -> None:
    """Make the writes of training batch norms explicit: return the statistics, and copy them.

    The schema does not declare these writes.
    """
    for node in recorded.graph.find_nodes(op="call_function", target=aten.native_batch_norm.default):
        statistics, training = node.args[3:5], node.args[5]
        if not training or not all(isinstance(value, fx.Node) for value in statistics):
            continue
        node.target = aten._native_batch_norm_legit_functional.default
        with recorded.graph.inserting_before(node.next):
            for position, statistic in enumerate(statistics, 3):
                new = recorded.graph.call_function(operator.getitem, (node, position))
                recorded.graph.call_function(aten.copy_.default, (statistic, new))
    recorded.recompile()
