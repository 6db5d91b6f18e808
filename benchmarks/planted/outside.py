"""Faults in what a graph shares with its surroundings: draws, saved values, collectives, devices, strides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import fxpasses
from benchmarks.planted import programs
from benchmarks.planted.plant import Plant, call_before, calls, gradients, in_place_of, swap
from fxpasses.compiling import graph_compilers

aten, prims = torch.ops.aten, torch.ops.prims


@fxpasses.graph_pass
def one_gradient_of_three(gm: fx.GraphModule) -> bool:
    """Squares the first factor in the gradient of the third factor."""
    changed = False
    for node in gradients(calls(gm, aten.mul.Tensor)):
        product = node.args[1]
        if getattr(product, "target", None) is aten.mul.Tensor and product.args[0] is not product.args[1]:
            first = product.args[0]
            node.replace_input_with(product, call_before(node, aten.mul.Tensor, first, first))
            changed = True
    return changed


@fxpasses.graph_pass
def draws_again_for_the_gradient(gm: fx.GraphModule) -> bool:
    """Draws the mask again in the backward pass instead of saving it."""
    changed = False
    for node in calls(gm, aten.rand.default, aten.rand_like.default):
        for mask in [user for user in node.users if user.target is aten.gt.Scalar]:
            later = gradients(list(mask.users))
            if later:
                again = call_before(later[0], node.target, *node.args, **node.kwargs)
                new = call_before(later[0], aten.gt.Scalar, again, mask.args[1])
                for user in later:
                    user.replace_input_with(mask, new)
                changed = True
    return changed


@fxpasses.graph_pass
def each_user_draws(gm: fx.GraphModule) -> bool:
    """Gives every user of a draw its own draw."""
    changed = False
    for node in calls(gm, aten.rand.default):
        for user in list(node.users)[1:]:
            user.replace_input_with(node, call_before(user, node.target, *node.args, **node.kwargs))
            changed = True
    return changed


@fxpasses.graph_pass
def draws_later(gm: fx.GraphModule) -> bool:
    """Moves the first draw after the last one."""
    found = calls(gm, aten.rand.default)
    if len(found) < 2:
        return False
    found[-1].append(found[0])
    users = [n for n in gm.graph.nodes if n in found[0].users]
    place = found[0]
    for user in users:
        place.append(user)
        place = user
    return True


@fxpasses.graph_pass
def counts_no_batches(gm: fx.GraphModule) -> bool:
    """Drops the increment of an integer counter in a buffer."""
    changed = False
    for node in calls(gm, aten.add.Tensor):
        if node.args[1] == 1 and node.meta["val"].dtype is torch.int64 and not node.meta["val"].dim():
            swap(node, node.args[0])
            changed = True
    return changed


@fxpasses.graph_pass
def parts_two_results(gm: fx.GraphModule) -> bool:
    """Splits two results that are views of one value into separate values."""
    (output,) = gm.graph.find_nodes(op="output")
    values = list(output.args[0])
    for number, value in enumerate(values):
        if isinstance(value, fx.Node) and value.target in (aten.view.default, aten.permute.default):
            copy = call_before(output, aten.clone.default, value.args[0])
            values[number] = call_before(output, value.target, copy, *value.args[1:])
            output.args = (type(output.args[0])(values),)
            return True
    return False


@fxpasses.graph_pass
def forgets_the_layout(gm: fx.GraphModule) -> bool:
    """Drops a copy into another layout and updates the metadata accordingly."""
    changed = False
    for node in calls(gm, aten.clone.default):
        if node.kwargs.get("memory_format") in (torch.contiguous_format, torch.channels_last):
            swap(node, node.args[0])
            changed = True
    return changed


@fxpasses.graph_pass
def believes_in_contiguous(gm: fx.GraphModule) -> bool:
    """Sums the rows of a matrix as if it were contiguous."""
    changed = False
    for node in calls(gm, aten.sum.dim_IntList):
        x = node.args[0]
        if x.op == "placeholder" and x.meta["val"].dim() == 2:
            rows, columns = x.meta["val"].shape
            flat = call_before(node, aten.as_strided.default, x, [rows, columns], [columns, 1])
            node.replace_input_with(x, flat)
            changed = True
    return changed


@fxpasses.graph_pass
def constant_elsewhere(gm: fx.GraphModule) -> bool:
    """Makes constants on the meta device."""
    changed = False
    for node in calls(gm, aten.full.default):
        in_place_of(node, aten.full.default, *node.args, **{**node.kwargs, "device": torch.device("meta")})
        changed = True
    return changed


@fxpasses.graph_pass
def alone_anyway(gm: fx.GraphModule) -> bool:
    """Drops all-reduces: right with a single process."""
    changed = False
    for node in calls(gm, torch.ops._c10d_functional.wait_tensor.default):
        reduced = node.args[0]
        if reduced.target is torch.ops._c10d_functional.all_reduce.default:
            swap(node, reduced.args[0])
            gm.graph.erase_node(reduced)
            changed = True
    return changed


@fxpasses.graph_pass
def mean_for_sum(gm: fx.GraphModule) -> bool:
    """Averages over all processes instead of summing: the same with a single process."""
    changed = False
    for node in calls(gm, torch.ops._c10d_functional.all_reduce.default):
        if node.args[1] == "sum":
            node.update_arg(1, "avg")
            changed = True
    return changed


def _partition(change: Any) -> Any:
    """Plant a fault in the graphs of the partition."""

    @contextmanager
    def planted() -> Iterator[None]:
        real = graph_compilers.partition

        def wrong(*args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
            forward, backward = real(*args, **kwargs)
            assert change(forward, backward), "nothing to change"
            forward.recompile()
            backward.recompile()
            return forward, backward

        with mock.patch.object(graph_compilers, "partition", wrong):
            yield

    return planted


def _saves_rounded(forward: fx.GraphModule, backward: fx.GraphModule) -> bool:
    """Rounds the first computed saved value to bfloat16."""
    (output,) = forward.graph.find_nodes(op="output")
    values = list(output.args[0])
    for number, value in enumerate(values[1:], 1):
        if isinstance(value, fx.Node) and value.op == "call_function":
            narrow = call_before(output, prims.convert_element_type.default, value, torch.bfloat16)
            values[number] = call_before(output, prims.convert_element_type.default, narrow, torch.float32)
            output.args = (type(output.args[0])(values),)
            return True
    return False


def _draws_again(forward: fx.GraphModule, backward: fx.GraphModule) -> bool:
    """Draws a saved mask again in the backward graph."""
    for node in backward.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if isinstance(value, Tensor) and value.dtype is torch.bool and node.users:
            user = next(iter(node.users))
            drawn = call_before(user, aten.rand.default, list(value.shape))
            mask = call_before(user, aten.gt.Scalar, drawn, 0.3)
            node.replace_all_uses_with(mask)
            return True
    return False


def _thrice(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a * b * c


def _dropped(x: Tensor) -> Tensor:
    return F.dropout(x.sin(), 0.3, True) * 2


def _shared_draw(x: Tensor) -> Tensor:
    draw = torch.rand(6)
    return x * draw + x.sin() * (1 - draw)


def _two_draws(x: Tensor) -> Tensor:
    return x * torch.rand(6), x + torch.rand(6)  # type: ignore[return-value]


def _two_views(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.sin()
    return y, y.view(-1)


def _as_channels_last(x: Tensor) -> Tensor:
    return x.sin().contiguous(memory_format=torch.channels_last)


def _row_sums(x: Tensor) -> Tensor:
    return x.sum(1) * 2


def _with_constant(x: Tensor) -> Tensor:
    return x.sin() + torch.full((3,), 2.0) * x


def _reduced(x: Tensor) -> Tensor:
    from torch.distributed import _functional_collectives as collectives

    return collectives.all_reduce(x.sin(), "sum", torch.distributed.group.WORLD) * 2


@contextmanager
def one_process() -> Iterator[None]:
    """Set up a process group of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).sin()


PLANTS = {
    "the gradient of one input": Plant(
        (one_gradient_of_three,), programs.function(_thrice, (5,), (5,), (5,))
    ),
    "a mask drawn again for the gradient": Plant(
        (draws_again_for_the_gradient,), programs.function(_dropped, (30,))
    ),
    "the same in bert": Plant((draws_again_for_the_gradient,), programs.hub("bert", training=True)),
    "a draw for each user": Plant((each_user_draws,), programs.function(_shared_draw, (6,)), training=False),
    "a draw moved": Plant((draws_later,), programs.function(_two_draws, (6,)), training=False),
    "a count forgotten": Plant((counts_no_batches,), lambda: (_Counting(), [torch.randn(4, 5)])),
    "two views parted": Plant((parts_two_results,), programs.function(_two_views, (2, 3)), training=False),
    "another layout": Plant((forgets_the_layout,), programs.function(_as_channels_last, (2, 3, 4, 5))),
    "memory not in order": Plant(
        (believes_in_contiguous,), lambda: (_row_sums, [torch.randn(4, 5).t().requires_grad_()])
    ),
    "a constant elsewhere": Plant((constant_elsewhere,), programs.function(_with_constant, (3,))),
    "a collective left out": Plant(
        (alone_anyway,), programs.function(_reduced, (3,)), training=False, surroundings=one_process
    ),
    "a mean for a sum": Plant(
        (mean_for_sum,), programs.function(_reduced, (3,)), training=False, surroundings=one_process
    ),
    "saved in fewer digits": Plant(
        (), programs.zoo("gpt"), blame="partition", surroundings=_partition(_saves_rounded)
    ),
    "a mask drawn again by the partition": Plant(
        (), programs.function(_dropped, (30,)), blame="partition", surroundings=_partition(_draws_again)
    ),
}
