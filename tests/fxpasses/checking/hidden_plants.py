"""Passes that are wrong on purpose, in ways that the first step of a model does not reveal."""

from __future__ import annotations

import torch
from torch import fx

import fxpasses
from benchmarks.planted.stages import drops_doubling, halves, marks, trusts_marks
from fxpasses.pass_manager.sites import claim
from tests.fxpasses.checking.plants import calls, in_place_of, put_after

__all__ = ["drops_doubling", "halves", "marks", "trusts_marks"]

aten = torch.ops.aten


@fxpasses.graph_pass
def forgets_the_limit(gm: fx.GraphModule) -> bool:
    """Takes away a clamp at six: only large values show it."""
    changed = False
    for target in (aten.clamp_max.default, aten.hardtanh.default, aten.clamp.default):
        for node in calls(gm, target):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
            changed = True
    return changed


@fxpasses.graph_pass
def forgets_the_least_divisor(gm: fx.GraphModule) -> bool:
    """Takes away the least number of a divisor: only a row that is zero inside of the model shows it."""
    divisors = [node for node in calls(gm, aten.clamp_min.default) if node.args[1] == 1e-12]
    for node in divisors:
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)
    return bool(divisors)


@fxpasses.graph_pass(graphs=["backward"])
def exchanges_saved_values(gm: fx.GraphModule) -> bool:
    """Exchanges the weights of two norms: both are ones at first."""
    saved = [n for n in gm.graph.find_nodes(op="placeholder") if str(n.target).startswith("primals")]
    pairs = [(a, b) for i, a in enumerate(saved) for b in saved[i + 1 :]]
    for a, b in pairs:
        if a.meta["val"].shape == b.meta["val"].shape == (8,) and a.users and b.users:
            users = list(a.users), list(b.users)
            for mine, other, those in ((a, b, users[0]), (b, a, users[1])):
                for user in those:
                    user.replace_input_with(mine, other)
            return True
    return False


@fxpasses.graph_pass
def forgets_the_last_row(gm: fx.GraphModule) -> bool:
    """Never looks up the last row of a table."""
    for node in calls(gm, aten.embedding.default):
        rows = node.args[0].meta["val"].shape[0]
        with gm.graph.inserting_before(node):
            index = fxpasses.insert_call(
                gm.graph, aten.clamp_max.default, (node.args[1], rows - 2), like=node
            )
        node.args = (node.args[0], index, *node.args[2:])
        return True
    return False


@fxpasses.graph_pass(numerics="bitwise")
def forgets_nan(gm: fx.GraphModule) -> bool:
    """x - x is zero, but for NaN and infinities."""
    changed = False
    for node in calls(gm, aten.sub.Tensor):
        if node.args[0] is node.args[1]:
            value = node.meta["val"]
            in_place_of(node, aten.full.default, (list(value.shape), 0.0), {"dtype": value.dtype})
            changed = True
    return changed


@fxpasses.graph_pass
def a_little_too_much(gm: fx.GraphModule) -> bool:
    """Takes every product times one, and one of them times 1.015: bfloat16 hides it a few layers on."""
    products = [n for n in gm.graph.nodes if n.target in (aten.mm.default, aten.addmm.default)]
    for position, node in enumerate(products):
        if claim(node):
            put_after(node, aten.mul.Tensor, (node, 1.015 if position == len(products) // 2 else 1.0))
    return bool(products)


@fxpasses.graph_pass
def under_one_percent(gm: fx.GraphModule) -> bool:
    """Takes every product of the forward pass times 1.006: in bfloat16 less than one or two units in the last place."""
    products = [n for n in gm.graph.nodes if n.target in (aten.mm.default, aten.addmm.default)]
    for node in products:
        if not fxpasses.graphs.provenance.is_backward(node):
            put_after(node, aten.mul.Tensor, (node, 1.006))
    return bool(products)


@fxpasses.graph_pass
def half_as_two_halves(gm: fx.GraphModule) -> bool:
    """Right: every product of the forward pass as the sum of two halves, in more roundings."""
    products = [n for n in gm.graph.nodes if n.target in (aten.mm.default, aten.addmm.default)]
    for node in products:
        with gm.graph.inserting_after(node):
            half = fxpasses.insert_call(gm.graph, aten.mul.Tensor, (node, 0.3), like=node)
        with gm.graph.inserting_after(half):
            rest = fxpasses.insert_call(gm.graph, aten.mul.Tensor, (node, 0.7), like=node)
        with gm.graph.inserting_after(rest):
            both = fxpasses.insert_call(gm.graph, aten.add.Tensor, (half, rest), like=node)
        node.replace_all_uses_with(both, delete_user_cb=lambda user, own=(half, rest): user not in own)
    return bool(products)


@fxpasses.graph_pass
def sine_for_cosine_inside(gm: fx.GraphModule) -> bool:
    """Takes cosines for sines in the graphs that other operators call."""
    changed = False
    for inner in gm.modules():
        if isinstance(inner, fx.GraphModule) and inner is not gm:
            for node in calls(inner, aten.sin.default):
                node.target = aten.cos.default
                changed = True
            inner.recompile()
    return changed


@fxpasses.graph_pass
def drops_an_output_inside(gm: fx.GraphModule) -> bool:
    """Gives what a branch returns another type."""
    for inner in gm.modules():
        if isinstance(inner, fx.GraphModule) and inner is not gm:
            (output,) = inner.graph.find_nodes(op="output")
            value = output.args[0][0]
            with inner.graph.inserting_before(output):
                half = fxpasses.insert_call(
                    inner.graph,
                    torch.ops.prims.convert_element_type.default,
                    (value, torch.float16),
                    like=value,
                )
            output.args = ((half, *output.args[0][1:]),)
            return True
    return False
