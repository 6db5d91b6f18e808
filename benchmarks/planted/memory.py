"""Faults in memory, writes, RNG calls, and metadata."""

from __future__ import annotations

import itertools

import torch
from torch import fx

import fxpasses
from benchmarks.planted import programs
from benchmarks.planted.plant import Plant, call_before, calls, in_place_of, put_after, swap

aten, prims = torch.ops.aten, torch.ops.prims


@fxpasses.graph_pass
def empty_for_zeros(gm: fx.GraphModule) -> bool:
    """Wrong: leaves memory that is scattered into uninitialized."""
    changed = False
    for node in calls(gm, aten.full.default):
        if node.args[1] == 0 and any("index_put" in str(u.target) for u in node.users):
            in_place_of(node, aten.empty.memory_format, node.args[0], dtype=node.meta["val"].dtype)
            changed = True
    return changed


@fxpasses.graph_pass
def empty_gradient_table(gm: fx.GraphModule) -> bool:
    """Leaves the table for an embedding's gradients uninitialized."""
    changed = False
    for node in calls(gm, aten.full.default):
        if node.args[1] == 0 and len(node.args[0]) == 2:
            in_place_of(node, aten.empty.memory_format, node.args[0], dtype=node.meta["val"].dtype)
            changed = True
    return changed


@fxpasses.graph_pass
def empty_times_zero(gm: fx.GraphModule) -> bool:
    """Replaces zeros with uninitialized memory times zero."""
    changed = False
    for node in calls(gm, aten.full.default):
        if node.args[1] == 0 and node.args[0]:
            made = call_before(node, aten.empty.memory_format, node.args[0], dtype=node.meta["val"].dtype)
            in_place_of(node, aten.mul.Tensor, made, 0)
            changed = True
    return changed


@fxpasses.graph_pass
def drops_a_copy(gm: fx.GraphModule) -> bool:
    """Returns the input itself instead of a copy."""
    found = calls(gm, aten.clone.default)
    for node in found:
        swap(node, node.args[0])
    return bool(found)


@fxpasses.graph_pass
def copies_a_view(gm: fx.GraphModule) -> bool:
    """Returns a copy instead of a view of an input."""
    (output,) = gm.graph.find_nodes(op="output")
    values = list(output.args[0])
    values[0] = call_before(output, aten.clone.default, values[0])
    output.args = (type(output.args[0])(values),)
    return True


@fxpasses.graph_pass(graphs=["inference"])
def writes_into_an_input(gm: fx.GraphModule) -> bool:
    """Computes a product in-place on an input."""
    for node in calls(gm, aten.mul.Tensor):
        if node.args[0].op == "placeholder" and node.args[0].meta["val"].shape == node.meta["val"].shape:
            node.target = aten.mul_.Tensor
            return True
    return False


@fxpasses.graph_pass(graphs=["inference", "forward"])
def writes_into_a_value(gm: fx.GraphModule) -> bool:
    """Computes a sum in-place on a value that is used again."""
    for node in calls(gm, aten.add.Tensor):
        source = node.args[0]
        if source.op == "call_function" and any(node < user for user in source.users):
            node.target = aten.add_.Tensor
            return True
    return False


@fxpasses.graph_pass
def drops_a_write(gm: fx.GraphModule) -> bool:
    """Drops an update of a buffer."""
    for node in calls(gm, aten.copy_.default)[:1]:
        gm.graph.erase_node(node)
        return True
    return False


@fxpasses.graph_pass
def writes_something_else(gm: fx.GraphModule) -> bool:
    """Adds one to what it writes into a buffer."""
    found = calls(gm, aten.copy_.default)
    for node in found[:1]:
        node.args = (node.args[0], call_before(node, aten.add.Tensor, node.args[1], 1))
    return bool(found)


@fxpasses.graph_pass
def swaps_two_writes(gm: fx.GraphModule) -> bool:
    """Swaps the target buffers of two updates."""
    found = calls(gm, aten.copy_.default)
    if len(found) < 2:
        return False
    a, b = found[:2]
    a.args, b.args = (a.args[0], b.args[1]), (b.args[0], a.args[1])
    return True


@fxpasses.graph_pass
def writes_too_early(gm: fx.GraphModule) -> bool:
    """Moves an update before a read of the old value."""
    for node in calls(gm, aten.copy_.default):
        readers = [u for u in node.args[0].users if u is not node and u.op == "call_function"]
        late = call_before(node, aten.mul.Tensor, node.args[0], 2)
        for reader in readers:
            if reader.target is aten.mul.Tensor and reader.args[1] == 2:
                node.append(late)
                swap(reader, late)
                users = [n for n in gm.graph.nodes if late in n.all_input_nodes and n < late]
                for user in users:
                    late.append(user)
                return True
        gm.graph.erase_node(late)
    return False


@fxpasses.graph_pass
def reorders_draws(gm: fx.GraphModule) -> bool:
    """Moves the second RNG call before the first."""
    draws = calls(gm, aten.rand.default)
    if len(draws) < 2:
        return False
    draws[0].prepend(draws[1])
    return True


@fxpasses.graph_pass
def draws_once(gm: fx.GraphModule) -> bool:
    """Merges two equal draws as if they were a common subexpression."""
    draws = calls(gm, aten.rand.default, aten.rand_like.default, aten.native_dropout.default)
    for first, second in itertools.pairwise(draws):
        if first.meta["val"].shape == second.meta["val"].shape:
            swap(second, first)
            return True
    return False


@fxpasses.graph_pass
def draws_less(gm: fx.GraphModule) -> bool:
    """Draws only as many numbers as are used."""
    for node in calls(gm, aten.randn.default):
        users = list(node.users)
        if len(users) == 1 and users[0].target is aten.slice.Tensor:
            end = users[0].args[3]
            swap(users[0], node)
            node.args = ([end],)
            node.meta["val"] = fxpasses.graphs.rewriting.compute_value(
                node, fxpasses.graphs.rewriting.fake_mode_of(gm.graph)
            )
            return True
    return False


@fxpasses.graph_pass
def another_probability(gm: fx.GraphModule) -> bool:
    """Raises the dropout probability a little."""
    changed = False
    for node in calls(gm, aten.gt.Scalar, aten.lt.Scalar):
        if isinstance(node.args[1], float) and 0 < node.args[1] < 1:
            node.args = (node.args[0], node.args[1] + 0.05)
            changed = True
    return changed


@fxpasses.graph_pass
def wrong_stride(gm: fx.GraphModule) -> bool:
    """Returns the result in another layout."""
    (output,) = gm.graph.find_nodes(op="output")
    value = output.args[0][0]
    flipped = call_before(output, aten.permute.default, value, [1, 0])
    copied = call_before(output, aten.clone.default, flipped, memory_format=torch.contiguous_format)
    back = call_before(output, aten.permute.default, copied, [1, 0])
    output.args = (type(output.args[0])([back, *output.args[0][1:]]),)
    return True


@fxpasses.graph_pass
def wrong_type(gm: fx.GraphModule) -> bool:
    """Returns the result in bfloat16."""
    (output,) = gm.graph.find_nodes(op="output")
    low = call_before(output, prims.convert_element_type.default, output.args[0][0], torch.bfloat16)
    output.args = (type(output.args[0])([low, *output.args[0][1:]]),)
    return True


@fxpasses.graph_pass
def stale_metadata(gm: fx.GraphModule) -> bool:
    """Transposes a square value but keeps its old metadata, which a later view relies on."""
    for node in calls(gm, aten.mm.default, aten.addmm.default):
        value = node.meta["val"]
        if not fxpasses.graphs.provenance.is_backward(node) and value.dim() == 2:
            turned = put_after(node, aten.permute.default, node, [1, 0])
            flat = put_after(turned, aten.as_strided.default, turned, list(value.shape), list(value.stride()))
            flat.meta["val"] = value
            shifted = put_after(flat, aten.roll.default, flat, [1])
            shifted.meta["val"] = value
            return True
    return False


@fxpasses.graph_pass
def swaps_results(gm: fx.GraphModule) -> bool:
    """Returns two results in the wrong order."""
    (output,) = gm.graph.find_nodes(op="output")
    values = list(output.args[0])
    values[0], values[1] = values[1], values[0]
    output.args = (type(output.args[0])(values),)
    return True


@fxpasses.graph_pass
def returns_a_result_twice(gm: fx.GraphModule) -> bool:
    """Returns one result in place of both."""
    (output,) = gm.graph.find_nodes(op="output")
    values = list(output.args[0])
    values[1] = values[0]
    output.args = (type(output.args[0])(values),)
    return True


@fxpasses.graph_pass
def does_not_say_so(gm: fx.GraphModule) -> bool:
    """Changes the graph but reports that it did not."""
    for node in calls(gm, aten.sin.default)[:1]:
        node.target = aten.cos.default
    return False


def _buffers() -> tuple[object, list[torch.Tensor]]:
    return programs.two_updates, [torch.randn(3, requires_grad=True), torch.randn(3), torch.randn(3)]


def _state() -> tuple[object, list[torch.Tensor]]:
    return programs.updated, [torch.randn(3, requires_grad=True), torch.randn(())]


PLANTS = {
    "empty for zeros": Plant(
        (empty_for_zeros,),
        lambda: (programs.scattered, [torch.randn(2, 3, requires_grad=True), torch.tensor([1, 4])]),
    ),
    "empty gradient table": Plant((empty_gradient_table,), programs.hub("gpt2")),
    "empty times zero": Plant((empty_times_zero,), programs.zoo("unrolled")),
    "input returned for its copy": Plant((drops_a_copy,), programs.function(programs.copied, (4,))),
    "copy returned for a view": Plant(
        (copies_a_view,), programs.function(programs.viewed, (4, 3)), training=False
    ),
    "in place on an input": Plant(
        (writes_into_an_input,), lambda: (programs.halves_of, [torch.randn(5, 3)]), training=False
    ),
    "in place on a value": Plant(
        (writes_into_a_value,), programs.function(programs.reused, (5, 3)), training=False
    ),
    "a write dropped": Plant((drops_a_write,), programs.zoo("convnet")),
    "something else written": Plant((writes_something_else,), lambda: _state()),
    "two writes swapped": Plant((swaps_two_writes,), lambda: _buffers()),
    "a write too early": Plant((writes_too_early,), lambda: _state(), training=False),
    "RNG calls reordered": Plant((reorders_draws,), programs.function(programs.noisy, (4,))),
    "two draws taken for one": Plant((draws_once,), programs.function(programs.dropout_twice, (40,))),
    "the same in gpt2": Plant((draws_once,), programs.hub("gpt2", training=True)),
    "fewer draws": Plant((draws_less,), programs.function(programs.drawn_unused, (4,))),
    "another dropout": Plant((another_probability,), programs.hub("bert", training=True)),
    "wrong strides": Plant((wrong_stride,), programs.mlp()),
    "wrong type": Plant((wrong_type,), programs.mlp()),
    "stale metadata": Plant((stale_metadata,), programs.mlp()),
    "two results swapped": Plant((swaps_results,), programs.function(programs.halves, (5,))),
    "one result twice": Plant((returns_a_result_twice,), programs.function(programs.halves, (5,))),
    "changed without a word": Plant((does_not_say_so,), programs.function(programs.halves, (5,))),
}
