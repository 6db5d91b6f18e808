"""Faults that only gradients show."""

from __future__ import annotations

import torch
from torch import fx

import fxpasses
from benchmarks.planted import programs
from benchmarks.planted.plant import Plant, call_before, calls, gradients, in_place_of, put_after, swap

aten = torch.ops.aten


@fxpasses.graph_pass(graphs=["joint"])
def tanh_without_square(gm: fx.GraphModule) -> bool:
    """The gradient of tanh as 1 - y instead of 1 - y * y."""
    squares = [n for n in gradients(calls(gm, aten.mul.Tensor)) if n.args[0] is n.args[1]]
    for node in squares:
        swap(node, node.args[0])
    return bool(squares)


@fxpasses.graph_pass(graphs=["joint"])
def coarser_gelu(gm: fx.GraphModule) -> bool:
    """The gradient of gelu with 0.4 for 0.3989."""
    changed = False
    for node in gradients(calls(gm, aten.mul.Tensor)):
        if isinstance(node.args[1], float) and abs(node.args[1] - 0.3989422804) < 1e-6:
            node.args = (node.args[0], 0.4)
            changed = True
    return changed


@fxpasses.graph_pass(graphs=["joint"])
def loses_a_summand(gm: fx.GraphModule) -> bool:
    """Keeps only one of two gradients that are added: drops one layer's residual connection."""
    sums = [
        n
        for n in gradients(calls(gm, aten.add.Tensor))
        if all(isinstance(a, fx.Node) and fxpasses.graphs.provenance.is_backward(a) for a in n.args[:2])
    ]
    if len(sums) < 3:
        return False
    swap(sums[2], sums[2].args[0])
    return True


@fxpasses.graph_pass(graphs=["joint"])
def zero_has_a_gradient(gm: fx.GraphModule) -> bool:
    """relu'(0) = 1: shows only for inputs that are exactly zero."""
    found = gradients(calls(gm, aten.le.Scalar))
    for node in found:
        node.target = aten.lt.Scalar
    return bool(found)


@fxpasses.graph_pass(graphs=["joint"])
def norm_without_mean(gm: fx.GraphModule) -> bool:
    """The gradient of a layer norm without the term that removes its mean."""
    for node in gradients(calls(gm, aten.sub.Tensor)):
        inner = node.args[1]
        if isinstance(inner, fx.Node) and inner.target is aten.sum.dim_IntList:
            swap(node, node.args[0])
            return True
    return False


@fxpasses.graph_pass(graphs=["joint"])
def transposed_weight_gradient(gm: fx.GraphModule) -> bool:
    """Returns the transposed gradient of a square weight."""
    (output,) = gm.graph.find_nodes(op="output")
    for node in output.all_input_nodes:
        if fxpasses.graphs.provenance.is_backward(node) and node.meta["val"].shape == (16, 16):
            turned = call_before(output, aten.permute.default, node, [1, 0])
            copy = call_before(output, aten.clone.default, turned, memory_format=torch.contiguous_format)
            output.replace_input_with(node, copy)
            return True
    return False


@fxpasses.graph_pass(graphs=["joint"])
def swaps_gradients(gm: fx.GraphModule) -> bool:
    """Swaps the gradients of two parameters of the same shape."""
    (output,) = gm.graph.find_nodes(op="output")
    values = list(output.args[0])
    found = [
        i
        for i, n in enumerate(values)
        if isinstance(n, fx.Node)
        and fxpasses.graphs.provenance.is_backward(n)
        and n.meta["val"].shape == (16, 16)
    ]
    if len(found) < 2:
        return False
    a, b = found[:2]
    values[a], values[b] = values[b], values[a]
    output.args = (type(output.args[0])(values),)
    return True


@fxpasses.graph_pass(graphs=["joint"])
def gradient_through_detach(gm: fx.GraphModule) -> bool:
    """Adds a gradient that the program detaches."""
    (output,) = gm.graph.find_nodes(op="output")
    values = list(output.args[0])
    node = values[1]
    extra = call_before(output, aten.sin.default, node)
    values[1] = call_before(output, aten.add.Tensor, node, extra)
    output.args = (type(output.args[0])(values),)
    return True


@fxpasses.graph_pass(graphs=["joint"])
def assumes_ones(gm: fx.GraphModule) -> bool:
    """Assumes that all tangents are ones, as after loss.backward()."""
    found = False
    for node in gm.graph.find_nodes(op="placeholder"):
        if str(node.target).startswith("tangents") and node.users:
            value = node.meta["val"]
            ones = call_before(
                next(iter(node.users)), aten.full.default, list(value.shape), 1.0, dtype=value.dtype
            )
            node.replace_all_uses_with(ones)
            found = True
    return found


@fxpasses.graph_pass(graphs=["joint"])
def unscaled_dropout_gradient(gm: fx.GraphModule) -> bool:
    """Drops the factor 1 / (1 - p) in the gradient of a dropout."""
    for node in gradients(calls(gm, aten.mul.Tensor)):
        if isinstance(node.args[1], float) and node.args[1] > 1:
            swap(node, node.args[0])
            return True
    return False


@fxpasses.graph_pass(graphs=["joint"])
def padding_gets_gradients(gm: fx.GraphModule) -> bool:
    """Gives gradients to the padding rows of an embedding."""
    changed = False
    for node in calls(gm, aten.embedding_dense_backward.default):
        if node.args[3] != -1:
            node.args = (*node.args[:3], -1, node.args[4])
            changed = True
    for node in gradients(calls(gm, aten.eq.Scalar, aten.ne.Scalar)):
        node.args = (node.args[0], -1)
        changed = True
    return changed


@fxpasses.graph_pass(graphs=["backward"])
def doubles_in_the_backward_graph(gm: fx.GraphModule) -> bool:
    """After partitioning: doubles the first product of the backward graph."""
    for node in calls(gm, aten.mul.Tensor)[:1]:
        put_after(node, aten.mul.Tensor, node, 2.0)
        return True
    return False


@fxpasses.graph_pass(graphs=["backward"])
def bias_gradient_of_one_row(gm: fx.GraphModule) -> bool:
    """Computes the gradient of a bias from the first row alone, scaled by the number of rows."""
    for node in calls(gm, aten.sum.dim_IntList):
        value = node.args[0].meta["val"]
        if list(node.args[1]) == [0] and value.dim() == 2 and node.args[2:] == (True,):
            row = call_before(node, aten.slice.Tensor, node.args[0], 0, 0, 1)
            in_place_of(node, aten.mul.Tensor, row, float(value.shape[0]))
            return True
    return False


@fxpasses.graph_pass(graphs=["forward"])
def saves_another_value(gm: fx.GraphModule) -> bool:
    """Saves the negative of an activation for the backward pass; the forward results stay right."""
    (output,) = gm.graph.find_nodes(op="output")
    values = list(output.args[0])
    for position, value in enumerate(values):
        if (
            position
            and isinstance(value, fx.Node)
            and value.target in (aten.tanh.default, aten.addmm.default)
        ):
            values[position] = call_before(output, aten.neg.default, value)
            output.args = (type(output.args[0])(values),)
            return True
    return False


class Padded(torch.nn.Module):
    """An embedding with a padding row, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = torch.nn.Embedding(9, 6, padding_idx=0), torch.nn.Linear(6, 3)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(index)).sin()


PLANTS = {
    "tanh without its square": Plant((tanh_without_square,), programs.mlp(activation=torch.tanh)),
    "coarser gelu": Plant((coarser_gelu,), programs.zoo("gpt")),
    "a residual's gradient lost": Plant((loses_a_summand,), programs.zoo("gpt")),
    "the same in llama": Plant((loses_a_summand,), programs.hub("llama")),
    "relu'(0) = 1": Plant((zero_has_a_gradient,), programs.mlp(activation=torch.relu)),
    "norm without the mean": Plant((norm_without_mean,), programs.hub("bert")),
    "a weight's gradient transposed": Plant((transposed_weight_gradient,), programs.mlp()),
    "two gradients swapped": Plant((swaps_gradients,), programs.mlp()),
    "a lost detach": Plant((gradient_through_detach,), programs.function(programs.detached, (5,), (5,))),
    "gradients taken for ones": Plant(
        (assumes_ones,), programs.function(programs.with_penalty, (4, 5), (5, 3))
    ),
    "dropout's gradient unscaled": Plant((unscaled_dropout_gradient,), programs.hub("gpt2", training=True)),
    "padding gets gradients": Plant(
        (padding_gets_gradients,), lambda: (Padded(), [torch.tensor([[0, 3], [4, 0]])])
    ),
    "backward graph doubled": Plant((doubles_in_the_backward_graph,), programs.hub("vit")),
    "bias gradient of one row": Plant((bias_gradient_of_one_row,), programs.mlp()),
    "another value saved": Plant((saves_another_value,), programs.mlp(activation=torch.tanh)),
}
