"""Passes that are wrong on purpose, each in a different way, and correct ones that look similar."""

from __future__ import annotations

import operator

import torch
from torch import fx

import fxpasses
from fxpasses.pass_manager.pass_base import FunctionPass
from fxpasses.pass_manager.sites import claim

aten, prims = torch.ops.aten, torch.ops.prims


def calls(gm: fx.GraphModule, target: object) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="call_function", target=target))


def put_after(node: fx.Node, target: object, args: tuple, kwargs: dict | None = None) -> fx.Node:
    """Insert a call after ``node``, and let everybody use it instead."""
    with node.graph.inserting_after(node):
        new = fxpasses.insert_call(node.graph, target, args, kwargs, like=node)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return new


def in_place_of(node: fx.Node, target: object, args: tuple, kwargs: dict | None = None) -> fx.Node:
    with node.graph.inserting_before(node):
        new = fxpasses.insert_call(node.graph, target, args, kwargs, like=node)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return new


@fxpasses.graph_pass(graphs=["joint"])
def wrong_gradient(gm: fx.GraphModule) -> bool:
    """The gradient of tanh without its square: only the backward pass is wrong."""
    squares = [n for n in calls(gm, aten.mul.Tensor) if n.args[0] is n.args[1]]
    for node in squares:
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)
    return bool(squares)


@fxpasses.graph_pass(graphs=["joint", "inference"])
def bakes_the_size_in(gm: fx.GraphModule) -> bool:
    """Writes the size that it sees while compiling where the symbol was: right for that size only."""
    changed = False
    for node in calls(gm, aten.mean.dim):
        (dim,) = node.args[1]
        size = node.args[0].meta["val"].shape[dim]
        size = size.node.hint if isinstance(size, torch.SymInt) else size
        total = in_place_of(node, aten.sum.dim_IntList, (node.args[0], [dim]))
        put_after(total, aten.div.Tensor, (total, size))
        changed = True
    return changed


@fxpasses.graph_pass(graphs=["joint", "inference"])
def wrong_for_odd_sizes(gm: fx.GraphModule) -> bool:
    """Sums halves of a dimension, and forgets the last element of an odd one."""
    changed = False
    for node in calls(gm, aten.sum.dim_IntList):
        x = node.args[0]
        size = x.meta["val"].shape[0]
        if node.args[1] != [0] or len(node.args) > 2 or not isinstance(size, int) or size < 3:
            continue
        half = size // 2
        with gm.graph.inserting_before(node):
            first = fxpasses.insert_call(gm.graph, aten.slice.Tensor, (x, 0, 0, half), like=node)
            second = fxpasses.insert_call(gm.graph, aten.slice.Tensor, (x, 0, half, 2 * half), like=node)
            both = fxpasses.insert_call(gm.graph, aten.add.Tensor, (first, second), like=node)
        node.args = (both, *node.args[1:])
        changed = True
    return changed


@fxpasses.graph_pass(graphs=["joint", "inference"])
def empty_for_zeros(gm: fx.GraphModule) -> bool:
    """Memory that is scattered into need not be set to zero, this pass believes."""
    changed = False
    for node in calls(gm, aten.full.default):
        if node.args[1] == 0 and any(u.target is aten.index_put.default for u in node.users):
            in_place_of(node, aten.empty.memory_format, (node.args[0],), {"dtype": node.meta["val"].dtype})
            changed = True
    return changed


@fxpasses.graph_pass(graphs=["joint", "inference"])
def drops_a_copy(gm: fx.GraphModule) -> bool:
    """Returns the input itself where a copy of it was returned."""
    found = calls(gm, aten.clone.default)
    for node in found:
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)
    return bool(found)


@fxpasses.graph_pass(graphs=["joint", "inference"])
def reorders_random_draws(gm: fx.GraphModule) -> bool:
    """Moves the second RNG call before the first."""
    draws = calls(gm, aten.rand.default)
    if len(draws) < 2:
        return False
    draws[0].prepend(draws[1])
    return True


def double_negations(gm: fx.GraphModule) -> list[tuple[fx.Node, fx.Node]]:
    """Each ``-(-x)``, with its ``x``."""
    found = [(n, n.args[0]) for n in calls(gm, aten.neg.default)]
    return [(n, inner.args[0]) for n, inner in found if inner.target is aten.neg.default]


def is_shifted_by_17(x: fx.Node) -> bool:
    return x.target is aten.add.Tensor and x.args[1] == 17


@fxpasses.graph_pass(graphs=["joint", "inference"])
def wrong_at_one_site(gm: fx.GraphModule) -> bool:
    """``-(-x)`` is ``x``; but where ``x`` is ``y + 17`` it drops one sign too many."""
    changed = False
    for node, x in double_negations(gm):
        if claim(node):
            node.replace_all_uses_with(node.args[0] if is_shifted_by_17(x) else x)
            changed = True
    return changed


@fxpasses.graph_pass(graphs=["joint", "inference"])
def wrong_at_one_place(gm: fx.GraphModule) -> bool:
    """The same without claiming its sites."""
    pairs = double_negations(gm)
    for node, x in pairs:
        node.replace_all_uses_with(node.args[0] if is_shifted_by_17(x) else x)
    return bool(pairs)


@fxpasses.graph_pass(graphs=["joint", "inference"])
def multiplies_in_bfloat16(gm: fx.GraphModule) -> bool:
    """Takes away the cast to float32 before a product: only bfloat16 has too few digits for that."""
    changed = False
    for node in calls(gm, prims.convert_element_type.default):
        if node.args[1] is torch.float32 and node.args[0].meta["val"].dtype is torch.bfloat16:
            for user in [u for u in node.users if u.target is aten.mul.Tensor and u.args[0] is node]:
                narrow = in_place_of(user, aten.mul.Tensor, (node.args[0], user.args[1]))
                put_after(narrow, prims.convert_element_type.default, (narrow, torch.float32))
                changed = True
    return changed


@fxpasses.graph_pass(graphs=["joint", "inference"])
def scales_in_bfloat16(gm: fx.GraphModule) -> bool:
    """Two percent too much, only in bfloat16."""
    changed = False
    for node in calls(gm, aten.tanh.default):
        if node.meta["val"].dtype is torch.bfloat16:
            put_after(node, aten.mul.Tensor, (node, 1.02))
            changed = True
    return changed


@fxpasses.graph_pass(graphs=["backward"])
def wrong_backward_graph(gm: fx.GraphModule) -> bool:
    """Doubles the first product of the backward graph."""
    for node in calls(gm, aten.mul.Tensor)[:1]:
        put_after(node, aten.mul.Tensor, (node, 2.0))
        return True
    return False


@fxpasses.graph_pass(graphs=["forward"])
def wrong_saved_value(gm: fx.GraphModule) -> bool:
    """Saves another value for the backward pass: the forward result stays right."""
    (output,) = gm.graph.find_nodes(op="output")
    values = list(output.args[0])
    for position, value in enumerate(values):
        if position and isinstance(value, fx.Node) and value.target is aten.mm.default:
            with gm.graph.inserting_before(output):
                values[position] = fxpasses.insert_call(gm.graph, aten.neg.default, (value,), like=value)
            output.args = (tuple(values),)
            return True
    return False


@fxpasses.graph_pass(graphs=["joint", "inference"])
def forgets_a_write(gm: fx.GraphModule) -> bool:
    """Leaves an input as it was that the graph has to update."""
    found = calls(gm, aten.copy_.default)
    for node in found:
        with gm.graph.inserting_before(node):
            twice = fxpasses.insert_call(gm.graph, aten.add.Tensor, (node.args[1], 1), like=node)
        node.args = (node.args[0], twice)
    return bool(found)


@fxpasses.graph_pass(graphs=["joint", "inference"])
def wrong_stride(gm: fx.GraphModule) -> bool:
    """Returns the result with another layout."""
    (output,) = gm.graph.find_nodes(op="output")
    value = output.args[0][0]
    with gm.graph.inserting_before(output):
        flipped = fxpasses.insert_call(gm.graph, aten.permute.default, (value, [1, 0]), like=value)
        copied = fxpasses.insert_call(
            gm.graph, aten.clone.default, (flipped,), {"memory_format": torch.contiguous_format}, like=value
        )
        back = fxpasses.insert_call(gm.graph, aten.permute.default, (copied, [1, 0]), like=value)
    output.args = ((back, *output.args[0][1:]),)
    return True


def a_local_pass(factor: float) -> FunctionPass:
    """A pass that closes over a value, and lives in a function: its source has to be embedded."""

    def scale(gm: fx.GraphModule) -> bool:
        found = calls(gm, aten.tanh.default)
        for node in found:
            put_after(node, operator.attrgetter("mul.Tensor")(aten), (node, factor))
        return bool(found)

    return fxpasses.graph_pass(scale, name="scale")


@fxpasses.graph_pass(graphs=["joint", "inference"])
def reorders_a_product(gm: fx.GraphModule) -> bool:
    """Right: ``(a * b) * c`` as ``a * (b * c)``, and ``a / b`` as ``a * (1 / b)``."""
    changed = False
    for node in calls(gm, aten.mul.Tensor):
        inner, other = node.args
        if getattr(inner, "target", None) is aten.mul.Tensor and isinstance(other, fx.Node):
            a, b = inner.args
            if all(isinstance(v, fx.Node) and isinstance(v.meta["val"], torch.Tensor) for v in (a, b)):
                with gm.graph.inserting_before(node):
                    product = fxpasses.insert_call(gm.graph, aten.mul.Tensor, (b, other), like=node)
                in_place_of(node, aten.mul.Tensor, (a, product))
                changed = True
    for node in calls(gm, aten.div.Tensor):
        if isinstance(node.args[1], fx.Node) and isinstance(node.args[1].meta["val"], torch.Tensor):
            with gm.graph.inserting_before(node):
                inverse = fxpasses.insert_call(gm.graph, aten.reciprocal.default, (node.args[1],), like=node)
            in_place_of(node, aten.mul.Tensor, (node.args[0], inverse))
            changed = True
    return changed


@fxpasses.graph_pass(graphs=["joint", "inference"])
def splits_products(gm: fx.GraphModule) -> bool:
    """Right: a matrix product as the sum of the products of two halves of the summed dimension."""
    changed = False
    for node in calls(gm, aten.mm.default):
        a, b = node.args
        size = a.meta["val"].shape[1]
        if not isinstance(size, int) or size < 2:
            continue
        half, parts = size // 2, []
        with gm.graph.inserting_before(node):
            for start, stop in ((0, half), (half, size)):
                left = fxpasses.insert_call(gm.graph, aten.slice.Tensor, (a, 1, start, stop), like=node)
                right = fxpasses.insert_call(gm.graph, aten.slice.Tensor, (b, 0, start, stop), like=node)
                parts.append(fxpasses.insert_call(gm.graph, aten.mm.default, (left, right), like=node))
        in_place_of(node, aten.add.Tensor, tuple(parts))
        changed = True
    return changed


@fxpasses.graph_pass(graphs=["joint", "inference"])
def raises_at_cos(gm: fx.GraphModule) -> bool:
    """Does not expect a cosine."""
    for node in calls(gm, aten.cos.default):
        raise ValueError(f"no cosine, please: {node}")
    return False


@fxpasses.graph_pass(graphs=["joint", "inference"])
def wrong_beyond_a_thousand(gm: fx.GraphModule) -> bool:
    """Cuts off what is larger than a thousand."""
    found = calls(gm, aten.cos.default)
    for node in found:
        with gm.graph.inserting_before(node):
            cut = fxpasses.insert_call(gm.graph, aten.clamp_max.default, (node.args[0], 1000.0), like=node)
        node.args = (cut,)
    return bool(found)


def rounds_otherwise(numerics: str) -> FunctionPass:
    """``x * y`` as ``(x * 3) * (y / 3)``: the same up to rounding."""

    def apply(gm: fx.GraphModule) -> bool:
        found = [n for n in calls(gm, aten.mul.Tensor) if isinstance(n.args[1], fx.Node)]
        for node in found:
            with gm.graph.inserting_before(node):
                x = fxpasses.insert_call(gm.graph, aten.mul.Tensor, (node.args[0], 3), like=node)
                y = fxpasses.insert_call(gm.graph, aten.div.Tensor, (node.args[1], 3), like=node)
            node.args = (x, y)
        return bool(found)

    return fxpasses.graph_pass(apply, name="rounds_otherwise", numerics=numerics)


def changes_numbers(numerics: str) -> FunctionPass:
    """Takes sines for cosines."""

    def apply(gm: fx.GraphModule) -> bool:
        found = calls(gm, aten.cos.default)
        for node in found:
            node.target = aten.sin.default
        return bool(found)

    return fxpasses.graph_pass(apply, name="changes_numbers", numerics=numerics)


@fxpasses.graph_pass(graphs=["joint", "inference"])
def scales_the_first_product(gm: fx.GraphModule) -> bool:
    """Two percent too much in a single place."""
    for node in [n for n in gm.graph.nodes if n.target in (aten.mm.default, aten.addmm.default)][:1]:
        put_after(node, aten.mul.Tensor, (node, 1.02))
        return True
    return False
