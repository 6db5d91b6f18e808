"""Faults that rarely show (ties, empty rows, large numbers, shared memory), written blind to the checks."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxpasses
from benchmarks.planted import programs
from benchmarks.planted.plant import (
    Plant,
    Workload,
    call_before,
    calls,
    gradients,
    in_place_of,
    known_value,
    put_after,
    swap,
)

aten, prims = torch.ops.aten, torch.ops.prims


@fxpasses.graph_pass(graphs=["joint"])
def largest_is_alone(gm: fx.GraphModule) -> bool:
    """Gives a maximum's gradient undivided to all equal elements."""
    found = [
        n
        for n in gradients(calls(gm, aten.div.Tensor))
        if getattr(n.args[1], "target", None) is aten.sum.dim_IntList
    ]
    for node in found:
        swap(node, node.args[0])
    return bool(found)


@fxpasses.graph_pass(graphs=["joint"])
def norms_are_not_zero(gm: fx.GraphModule) -> bool:
    """Divides by a norm in its gradient, even where it is zero."""
    found = [n for n in gradients(calls(gm, aten.where.self)) if known_value(n.args[0]).dtype is torch.bool]
    for node in found:
        swap(node, node.args[2])
    return bool(found)


@fxpasses.graph_pass
def softplus_without_threshold(gm: fx.GraphModule) -> bool:
    """log(1 + exp(x)), even for large x."""
    found = [
        n for n in calls(gm, aten.where.self) if getattr(n.args[2], "target", None) is aten.log1p.default
    ]
    for node in found:
        swap(node, node.args[2])
    return bool(found)


@fxpasses.graph_pass
def difference_of_one(gm: fx.GraphModule) -> bool:
    """expm1(x) as exp(x) - 1: small x lose all digits."""
    found = calls(gm, aten.expm1.default)
    for node in found:
        in_place_of(node, aten.sub.Tensor, call_before(node, aten.exp.default, node.args[0]), 1.0)
    return bool(found)


@fxpasses.graph_pass
def logarithm_of_softmax(gm: fx.GraphModule) -> bool:
    """x - log(sum(exp(x))) as log(exp(x) / sum(exp(x))): minus infinity where the quotient is zero."""
    for node in calls(gm, aten.sub.Tensor):
        log = node.args[1]
        if getattr(log, "target", None) is aten.log.default:
            exp = log.args[0].args[0]
            quotient = call_before(node, aten.div.Tensor, exp, log.args[0])
            in_place_of(node, aten.log.default, quotient)
            return True
    return False


@fxpasses.graph_pass
def every_label_counts(gm: fx.GraphModule) -> bool:
    """Divides a loss by the number of all labels, including ignored ones."""
    found = [n for n in calls(gm, aten.sum.default) if known_value(n.args[0]).dtype is torch.bool]
    for node in found:
        in_place_of(node, aten.full.default, [], known_value(node.args[0]).numel(), dtype=torch.int64)
    return bool(found)


@fxpasses.graph_pass
def variance_by_moments(gm: fx.GraphModule) -> bool:
    """The variance as E[x * x] - E[x] ** 2: it loses all digits far from zero."""
    found = calls(gm, aten.var_mean.correction)
    for node in found:
        x, dims = node.args[:2]
        square = call_before(node, aten.mul.Tensor, x, x)
        mean = call_before(node, aten.mean.dim, x, list(dims), True)
        second = call_before(node, aten.mean.dim, square, list(dims), True)
        variance = call_before(node, aten.sub.Tensor, second, call_before(node, aten.mul.Tensor, mean, mean))
        for user in list(node.users):
            swap(user, (variance, mean)[user.args[1]])
        gm.graph.erase_node(node)
    return bool(found)


@fxpasses.graph_pass(graphs=["joint"])
def bias_by_the_other_dimension(gm: fx.GraphModule) -> bool:
    """Sums a bias gradient over columns: shapes do not tell, because the matrix is square."""
    for node in gradients(calls(gm, aten.sum.dim_IntList)):
        value = known_value(node.args[0])
        if value.dim() == 2 and list(node.args[1]) == [0] and value.shape[0] == value.shape[1]:
            total = call_before(node, aten.sum.dim_IntList, node.args[0], [1])
            in_place_of(node, aten.view.default, total, list(known_value(node).shape))
            return True
    return False


@fxpasses.graph_pass
def results_share_memory(gm: fx.GraphModule) -> bool:
    """Returns a value twice instead of the value and its copy."""
    output = next(iter(reversed(gm.graph.nodes)))
    found = [n for n in calls(gm, aten.clone.default) if output in n.users]
    for node in found:
        swap(node, node.args[0])
    return bool(found)


@fxpasses.graph_pass(graphs=["forward"])
def over_what_is_saved(gm: fx.GraphModule) -> bool:
    """Overwrites, in the forward graph, a value that the backward graph reads."""
    output = next(iter(reversed(gm.graph.nodes)))
    for node in calls(gm, aten.mul.Tensor):
        x = node.args[0]
        if isinstance(x, fx.Node) and x.op == "call_function" and output in x.users:
            node.target = aten.mul_.Tensor
            return True
    return False


@fxpasses.graph_pass(graphs=["backward"])
def over_a_weight(gm: fx.GraphModule) -> bool:
    """Overwrites a weight in the backward graph."""
    for node in calls(gm, aten.mul.Tensor):
        for k, x in enumerate(node.args):
            if isinstance(x, fx.Node) and x.op == "placeholder" and x.name.startswith("primals"):
                node.target, node.args = aten.mul_.Tensor, (x, node.args[1 - k])
                return True
    return False


@fxpasses.graph_pass
def writes_into_an_expanded(gm: fx.GraphModule) -> bool:
    """Adds in-place to an expanded value, whose rows share memory."""
    for node in calls(gm, aten.add.Tensor):
        x = node.args[0]
        if getattr(x, "target", None) is aten.expand.default and len(x.users) == 1:
            row = call_before(node, aten.select.int, x, 0, 0)
            other = call_before(node, aten.select.int, node.args[1], 0, 0)
            total = call_before(node, aten.add.Tensor, row, other)
            in_place_of(node, aten.expand.default, total, list(known_value(node).shape))
            return True
    return False


@fxpasses.graph_pass
def draws_in_two_halves(gm: fx.GraphModule) -> bool:
    """Draws normal numbers in two halves, which differ from those of a single draw."""
    for node in calls(gm, aten.randn.default):
        rows = node.args[0][0]
        halves = [
            call_before(node, aten.randn.default, [count, *node.args[0][1:]], **node.kwargs)
            for count in (rows // 2, rows - rows // 2)
        ]
        in_place_of(node, aten.cat.default, halves)
        return True
    return False


@fxpasses.graph_pass(graphs=["joint"])
def no_gradient(gm: fx.GraphModule) -> bool:
    """Wrong: replaces a gradient with zeros as if nobody needed it."""
    output = next(iter(reversed(gm.graph.nodes)))
    found = [n for n in output.all_input_nodes if fxpasses.graphs.provenance.is_backward(n)]
    for node in found[-1:]:
        kind = {"dtype": known_value(node).dtype}
        zeros = call_before(output, aten.full.default, list(known_value(node).shape), 0.0, **kind)
        output.replace_input_with(node, zeros)
    return bool(found)


def _two_graphs(x: Tensor) -> Tensor:
    y = x.sin() * 2
    torch._dynamo.graph_break()
    return y.cos() * 3


@fxpasses.graph_pass
def second_graph_only(gm: fx.GraphModule) -> bool:
    """Replaces 3 with 3.01, which occurs only in the second of two graphs."""
    found = [n for n in calls(gm, aten.mul.Tensor) if n.args[1] == 3]
    for node in found[:1]:
        node.args = (node.args[0], 3.01)
    return bool(found)


class Deep(nn.Module):
    """Forty equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(40))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh() / 40
        return x


@fxpasses.graph_pass(graphs=["joint"])
def one_weight_of_forty(gm: fx.GraphModule) -> bool:
    """Makes the gradient of the 29th of forty weights 0.2% too large."""
    products = [
        n
        for n in gradients(calls(gm, aten.mm.default))
        if list(known_value(n).shape) == [8, 8] and n.args[0].target is aten.permute.default
    ]
    for node in products[28:29] or products[-1:]:
        put_after(node, aten.mul.Tensor, node, 1.002)
    return bool(products)


@fxpasses.graph_pass
def silu_of_another(gm: fx.GraphModule) -> bool:
    """Replaces x * sigmoid(y) with silu(x), whatever y is."""
    changed = False
    for node in calls(gm, aten.mul.Tensor):
        gate = node.args[1]
        if getattr(gate, "target", None) is aten.sigmoid.default:
            mine = call_before(node, aten.sigmoid.default, node.args[0])
            node.args = (node.args[0], mine)
            changed = True
    return changed


@fxpasses.graph_pass
def sums_in_the_type_of_inputs(gm: fx.GraphModule) -> bool:
    """Computes a float32 running sum of bfloat16 values in bfloat16."""
    for node in calls(gm, aten.cumsum.default):
        if known_value(node).dtype is torch.float32:
            x = node.args[0]
            if known_value(x).dtype is torch.float32:
                x = call_before(node, prims.convert_element_type.default, x, torch.bfloat16)
            narrow = call_before(node, aten.cumsum.default, x, node.args[1])
            in_place_of(node, prims.convert_element_type.default, narrow, torch.float32)
            return True
    return False


@fxpasses.graph_pass
def old_values_compete(gm: fx.GraphModule) -> bool:
    """Includes the old values in a grouped maximum."""
    found = calls(gm, aten.scatter_reduce.two)
    for node in found:
        node.kwargs = {**node.kwargs, "include_self": True}
    return bool(found)


def _gated(x: Tensor, y: Tensor) -> Tensor:
    return x * y.sigmoid() + x.cos()


def _loss(x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(x, labels)


def _plain(f: Any, *inputs: Any) -> Workload:
    return lambda: (f() if isinstance(f, type) else f, [i() for i in inputs])


_learning = functools.partial(torch.randn, 4, 6, requires_grad=True)
_labels = functools.partial(torch.tensor, [1, 2, 0, 3])


def _expanded(x: Tensor, y: Tensor) -> Tensor:
    return x[:1].expand(4, 6) + y


def _far(x: Tensor) -> Tensor:
    return F.layer_norm(x + 3000, (6,))


PLANTS = {
    "equal maxima": Plant((largest_is_alone,), _plain(lambda x: x.amax(-1), _learning)),
    "a norm of zero": Plant((norms_are_not_zero,), _plain(lambda x: x.norm(dim=-1), _learning)),
    "softplus of large numbers": Plant((softplus_without_threshold,), _plain(F.softplus, _learning)),
    "softplus in mamba": Plant((softplus_without_threshold,), programs.hub("mamba")),
    "expm1 of small numbers": Plant((difference_of_one,), _plain(torch.expm1, _learning)),
    "logarithm of a softmax": Plant((logarithm_of_softmax,), _plain(_loss, _learning, _labels)),
    "labels to ignore": Plant((every_label_counts,), _plain(_loss, _learning, _labels)),
    "variance by moments": Plant((variance_by_moments,), _plain(_far, _learning)),
    "a bias's gradient, square": Plant((bias_by_the_other_dimension,), programs.mlp(rows=16)),
    "results that share memory": Plant(
        (results_share_memory,), _plain(lambda x: (y := x.sin(), y.clone()), _learning), training=False
    ),
    "in place on what is saved": Plant(
        (over_what_is_saved,),
        _plain(lambda x, w: (x @ w).exp() * 2, _learning, lambda: torch.randn(6, 6, requires_grad=True)),
    ),
    "in place on a weight": Plant(
        (over_a_weight,), _plain(lambda x, w: x * w.sin() * w, _learning, _learning)
    ),
    "in place on one row for all": Plant((writes_into_an_expanded,), _plain(_expanded, _learning, _learning)),
    "draws in two halves": Plant((draws_in_two_halves,), _plain(lambda x: x * torch.randn(4, 6), _learning)),
    "no gradient, llama": Plant((no_gradient,), programs.hub("llama")),
    "the second graph": Plant((second_graph_only,), _plain(_two_graphs, _learning)),
    "one weight of forty": Plant((one_weight_of_forty,), lambda: (Deep(), [torch.randn(6, 8)])),
    "silu of another": Plant((silu_of_another,), _plain(_gated, _learning, _learning)),
    "running sums in bfloat16": Plant(
        (sums_in_the_type_of_inputs,),
        _plain(
            lambda x: x.cumsum(0, dtype=torch.float32),
            lambda: torch.randn(64, 3, dtype=torch.bfloat16, requires_grad=True),
        ),
    ),
    "old values compete": Plant(
        (old_values_compete,),
        _plain(
            lambda x, y: (x * 1).scatter_reduce(
                1, torch.zeros(4, 6, dtype=torch.long), y, "amax", include_self=False
            ),
            _learning,
            _learning,
        ),
    ),
}
