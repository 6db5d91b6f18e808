"""Faults between passes, and in stages that are not passes: the partition, Inductor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx

import fxpasses
from benchmarks.planted import programs
from benchmarks.planted.plant import Plant, call_before, calls, in_place_of, swap
from fxpasses.compiling import graph_compilers

aten = torch.ops.aten


@fxpasses.graph_pass
def marks(gm: fx.GraphModule) -> bool:
    """Correct: tanh(x) as -tanh(-x), with a mark on the call."""
    changed = False
    for node in calls(gm, aten.tanh.default):
        inner = call_before(node, aten.tanh.default, call_before(node, aten.neg.default, node.args[0]))
        inner.meta["odd"] = True
        in_place_of(node, aten.neg.default, inner)
        changed = True
    return changed


@fxpasses.graph_pass
def trusts_marks(gm: fx.GraphModule) -> bool:
    """Correct without marks; assumes that the result of a marked call needs no negation."""
    changed = False
    for node in calls(gm, aten.neg.default):
        if getattr(node.args[0], "meta", {}).get("odd"):
            swap(node, node.args[0])
            changed = True
    return changed


@fxpasses.graph_pass
def halves(gm: fx.GraphModule) -> bool:
    """Correct: halves each weight of a product and doubles it again."""
    changed = False
    for node in calls(gm, aten.mm.default, aten.addmm.default):
        half = call_before(node, aten.mul.Tensor, node.args[-1], 0.5)
        if fxpasses.graphs.provenance.is_backward(node):
            continue
        twice = call_before(node, aten.mul.Tensor, half, 2.0)
        node.replace_input_with(node.args[-1], twice)
        changed = True
    return changed


@fxpasses.graph_pass
def drops_doubling(gm: fx.GraphModule) -> bool:
    """Correct for models that never double anything: drops multiplications by two."""
    changed = False
    for node in calls(gm, aten.mul.Tensor):
        if node.args[1] == 2.0 and isinstance(node.args[1], float):
            swap(node, node.args[0])
            changed = True
    return changed


@fxpasses.graph_pass
def raises(gm: fx.GraphModule) -> bool:
    """Raises on an error function."""
    for node in calls(gm, aten.erf.default):
        raise ValueError(f"no error function, please: {node}")
    return False


@fxpasses.graph_pass
def leaves_a_dead_input(gm: fx.GraphModule) -> bool:
    """Adds an input that nobody passes."""
    first = next(iter(gm.graph.nodes))
    with gm.graph.inserting_before(first):
        extra = gm.graph.placeholder("extra")
    extra.meta = dict(first.meta)
    return True


@fxpasses.graph_pass
def drops_an_output(gm: fx.GraphModule) -> bool:
    """Returns one result too few."""
    (output,) = gm.graph.find_nodes(op="output")
    output.args = (type(output.args[0])(list(output.args[0])[:-1]),)
    return True


@fxpasses.graph_pass(numerics="bitwise")
def reassociates(gm: fx.GraphModule) -> bool:
    """Promises the same bits, but adds in another order."""
    for node in calls(gm, aten.add.Tensor):
        inner, other = node.args
        if getattr(inner, "target", None) is aten.add.Tensor and isinstance(other, fx.Node):
            a, b = inner.args
            if isinstance(b, fx.Node):
                node.args = (a, call_before(node, aten.add.Tensor, b, other))
                return True
    return False


@fxpasses.graph_pass
def reassociates_rightly(gm: fx.GraphModule) -> bool:
    """Correct: adds in another order, and declares that rounding changes."""
    return reassociates.apply(gm)


@contextmanager
def wrong_partition() -> Iterator[None]:
    """Swap the first two saved values that look alike in the partition."""
    real = graph_compilers.partition

    def wrong(*args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = real(*args, **kwargs)
        (output,) = forward.graph.find_nodes(op="output")
        values = list(output.args[0])
        calls = [i for i, n in enumerate(values) if i and isinstance(n, fx.Node) and n.op == "call_function"]
        a, b = next(
            (i, j)
            for i, j in itertools.combinations(calls, 2)
            if fxpasses.graphs.rewriting.same_metadata(values[i].meta["val"], values[j].meta["val"])
        )
        values[a], values[b] = values[b], values[a]
        output.args = (type(output.args[0])(values),)
        forward.recompile()
        return forward, backward

    with mock.patch.object(graph_compilers, "partition", wrong):
        yield


@contextmanager
def partition_forgets() -> Iterator[None]:
    """Replace the first sum in the partition's backward graph with a maximum."""
    real = graph_compilers.partition

    def wrong(*args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = real(*args, **kwargs)
        for node in calls(backward, aten.sum.dim_IntList):
            in_place_of(node, aten.amax.default, *node.args)
            backward.recompile()
            return forward, backward
        raise AssertionError("nothing to change")

    with mock.patch.object(graph_compilers, "partition", wrong):
        yield


def _mlp(width: int = 16) -> Any:
    return programs.mlp(activation=torch.tanh)


PLANTS = {
    "wrong only together": Plant((marks, trusts_marks), _mlp(), partners=("marks",)),
    "the same, with others between": Plant(
        (halves, reassociates_rightly, drops_doubling), programs.zoo("gpt")
    ),
    "raises": Plant((raises,), programs.zoo("gpt")),
    "one input more": Plant((leaves_a_dead_input,), _mlp()),
    "one result fewer": Plant((drops_an_output,), _mlp()),
    "other bits than promised": Plant((reassociates,), programs.hub("llama")),
    "saved values exchanged": Plant((), _mlp(), blame="partition", surroundings=wrong_partition),
    "another call in the backward graph": Plant(
        (), programs.zoo("gpt"), blame="partition", surroundings=partition_forgets
    ),
}
