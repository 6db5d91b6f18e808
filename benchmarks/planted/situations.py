"""Faults that show only sometimes: second calls, other inputs, untaken branches, layouts, batches of one."""

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
    put_after,
    swap,
)

aten, prims = torch.ops.aten, torch.ops.prims


class Averaged(nn.Module):
    """A moving average with a bias correction for its first steps, as in optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.average: Tensor
        self.steps: Tensor
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.average / (1 - 0.9**self.steps)


@fxpasses.graph_pass
def always_the_first_step(gm: fx.GraphModule) -> bool:
    """Replaces the number of steps with one."""
    found = [n for n in calls(gm, aten.pow.Scalar) if n.args[0] == 0.9]
    for node in found:
        in_place_of(node, aten.full.default, [], 0.9)
    return bool(found)


@fxpasses.graph_pass
def average_from_zero(gm: fx.GraphModule) -> bool:
    """Wrong: replaces 0.9 times the average with zero, because the average starts at zero."""
    found = [n for n in calls(gm, aten.mul.Tensor) if n.args[0].op == "placeholder" and n.args[1] == 0.9]
    for node in found:
        in_place_of(node, aten.full.default, [4], 0.0)
    return bool(found)


_TABLES: dict[tuple[int, ...], Tensor] = {}


@torch.library.custom_op("planted::remembered_cos", mutates_args=())
def remembered_cos(x: Tensor) -> Tensor:
    """Return the cosine that was computed first for this shape."""
    return _TABLES.setdefault(tuple(x.shape), x.cos()).clone()


@remembered_cos.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@fxpasses.graph_pass
def tables_of_cosines(gm: fx.GraphModule) -> bool:
    """Keeps the cosines of positions from the first call."""
    _TABLES.clear()
    found = [n for n in calls(gm, aten.cos.default) if not fxpasses.graphs.provenance.is_backward(n)]
    for node in found:
        in_place_of(node, torch.ops.planted.remembered_cos.default, node.args[0])
    return bool(found)


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """A rotation by positions."""
    angles = positions[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    return x * angles.cos() + x.flip(-1) * angles.sin()


@fxpasses.graph_pass(numerics="bitwise")
def relu_by_comparison(gm: fx.GraphModule) -> bool:
    """relu(x) as where(x > 0, x, 0): NaN becomes zero."""
    found = calls(gm, aten.relu.default)
    for node in found:
        positive = call_before(node, aten.gt.Scalar, node.args[0], 0)
        in_place_of(node, aten.where.ScalarOther, positive, node.args[0], 0.0)
    return bool(found)


def masked_rows(x: Tensor, keep: Tensor) -> Tensor:
    """A softmax that returns zeros for fully masked rows."""
    scores = x.masked_fill(~keep, float("-inf"))
    weights = scores.softmax(-1)
    return torch.where(keep.any(-1, keepdim=True), weights, 0.0)


@fxpasses.graph_pass
def no_row_is_empty(gm: fx.GraphModule) -> bool:
    """Wrong: assumes that every row has an unmasked key."""
    found = [
        n
        for n in calls(gm, aten.where.self)
        if not fxpasses.graphs.provenance.is_backward(n) and n.args[1].target is aten.div.Tensor
    ]
    for node in found:
        swap(node, node.args[1])
    return bool(found)


def reciprocal_of_sum(x: Tensor) -> Tensor:
    """A function whose result shows the sign of zero."""
    return 1 / (x + 0.0)


@fxpasses.graph_pass(numerics="bitwise")
def adds_of_zero(gm: fx.GraphModule) -> bool:
    """x + 0 as x: -0 stays -0."""
    found = [n for n in calls(gm, aten.add.Tensor) if n.args[1] == 0]
    for node in found:
        swap(node, node.args[0])
    return bool(found)


def smooth_maximum(x: Tensor) -> Tensor:
    """A maximum that is safe for large numbers."""
    return x.logsumexp(-1)


@fxpasses.graph_pass
def plain_logarithm(gm: fx.GraphModule) -> bool:
    """log(sum(exp(x))) without subtracting the maximum: infinite for large numbers."""
    found = [n for n in calls(gm, aten.amax.default) if not fxpasses.graphs.provenance.is_backward(n)]
    for node in found:
        in_place_of(node, aten.full.default, list(node.meta["val"].shape), 0.0)
    return bool(found)


def _inside(gm: fx.GraphModule, part: str) -> list[fx.GraphModule]:
    return [m for name, m in gm.named_modules() if isinstance(m, fx.GraphModule) and part in name]


@fxpasses.graph_pass
def other_branch(gm: fx.GraphModule) -> bool:
    """Drops a constant in the branch that is not taken."""
    changed = False
    for graph in _inside(gm, "false"):
        for node in calls(graph, aten.sub.Tensor):
            swap(node, node.args[0])
            changed = True
        graph.recompile()
    return changed


def looped(x: Tensor) -> Tensor:
    """A loop whose number of rounds depends on values."""
    from torch._higher_order_ops.while_loop import while_loop

    return while_loop(
        lambda k, y: (k < 5) & (y.sum() < 100), lambda k, y: (k + 1, y * 1.5 + 0.25), (torch.tensor(0), x)
    )[1]


@fxpasses.graph_pass
def one_round_more(gm: fx.GraphModule) -> bool:
    """Lets a loop run while k <= 5."""
    changed = False
    for graph in _inside(gm, "cond"):
        for node in calls(graph, aten.lt.Scalar):
            if node.args[1] == 5:
                in_place_of(node, aten.le.Scalar, *node.args)
                changed = True
        graph.recompile()
    return changed


def two_heads(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Two heads; the second one is detached from what the first one sees."""
    seen = (x @ w).tanh()
    return seen.square().sum(), (seen.detach() @ w).sin().sum()


@fxpasses.graph_pass(graphs=["joint"])
def detach_dropped(gm: fx.GraphModule) -> bool:
    """Lets the gradient flow through the second head, too."""
    for node in gradients(calls(gm, aten.mul.Tensor)):
        if any(getattr(a, "target", None) in (aten.sub.Tensor, aten.rsub.Scalar) for a in node.args):
            slope = next(
                a for a in node.args if getattr(a, "target", None) not in (aten.sub.Tensor, aten.rsub.Scalar)
            )
            if not isinstance(slope, fx.Node) or slope.meta["val"].dim() != 2:
                continue
            cosines = calls(gm, aten.cos.default)
            weights = gm.graph.find_nodes(op="placeholder")[1]
            back = call_before(node, aten.mm.default, cosines[0], call_before(node, aten.t.default, weights))
            node.replace_input_with(slope, call_before(node, aten.add.Tensor, slope, back))
            return True
    return False


def transposed_out(x: Tensor) -> Tensor:
    """A result whose last dimension is not the fastest."""
    return (x.sin() * 2).transpose(0, 1)


@fxpasses.graph_pass
def made_contiguous(gm: fx.GraphModule) -> bool:
    """Copies results to be contiguous."""
    found = [
        n
        for n in calls(gm, aten.transpose.int, aten.permute.default)
        if not fxpasses.graphs.provenance.is_backward(n)
    ]
    for node in found:
        put_after(node, aten.clone.default, node, memory_format=torch.contiguous_format)
    return bool(found)


def flattened(x: Tensor) -> Tensor:
    """All elements in one row."""
    return x.sin().t().reshape(-1) + x.reshape(-1)


def _columns() -> tuple[Any, list[Tensor]]:
    return flattened, [torch.randn(4, 4).t().requires_grad_()]


@fxpasses.graph_pass
def read_as_it_lies(gm: fx.GraphModule) -> bool:
    """Drops the copy of a reshape: memory is read in storage order."""
    changed = False
    for node in calls(gm, aten.view.default, aten._unsafe_view.default):
        source = node.args[0]
        if getattr(
            source, "target", None
        ) is aten.clone.default and not fxpasses.graphs.provenance.is_backward(node):
            in_place_of(node, aten.as_strided.default, source.args[0], list(node.meta["val"].shape), [1])
            changed = True
    return changed


class Normed(nn.Module):
    """Normalization by batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return (y - y.mean((0, 1))) / (y.var((0, 1), correction=0) + 1e-5).sqrt()


@fxpasses.graph_pass
def batch_of_one(gm: fx.GraphModule) -> bool:
    """Wrong: for a batch of one, replaces the mean over batch and time with one element."""
    changed = False
    for node in calls(gm, aten.mean.dim):
        x = node.args[0]
        if x.meta["val"].shape[0] == 1 and list(node.args[1]) == [0, 1]:
            one = call_before(node, aten.select.int, x, 0, 0)
            in_place_of(node, aten.select.int, one, 0, 0)
            changed = True
    return changed


def counted(x: Tensor, flags: Tensor) -> Tensor:
    """Counts in int64, whatever the dtype of the flags."""
    return x * flags.sum(-1, keepdim=True)


@fxpasses.graph_pass
def counts_in_bytes(gm: fx.GraphModule) -> bool:
    """Sums bytes in one byte."""
    changed = False
    for node in calls(gm, aten.sum.dim_IntList):
        if node.args[0].meta["val"].dtype is torch.uint8:
            small = call_before(node, aten.sum.dim_IntList, *node.args, dtype=torch.uint8)
            in_place_of(node, prims.convert_element_type.default, small, torch.int64)
            changed = True
    return changed


class Cached(nn.Module):
    """Attention over keys that are cached between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: Tensor
        self.register_buffer("keys", torch.zeros(8, 4))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        key = self.layer(x)
        self.keys.index_copy_(0, position, key.detach())
        seen = torch.arange(8) <= position
        weights = (x @ self.keys.t()).masked_fill(~seen, float("-inf")).softmax(-1)
        return weights @ self.keys


def cached() -> tuple[nn.Module, list[Tensor]]:
    """Build the module, an input, and the first position."""
    return Cached(), [torch.randn(1, 4), torch.tensor([0])]


@fxpasses.graph_pass
def cache_read_too_early(gm: fx.GraphModule) -> bool:
    """Lets the second use of the cached keys read the old ones."""
    found = calls(gm, aten.index_put.default, aten.index_copy.default)
    for node in found:
        users = [u for u in node.users if u.target is aten.mm.default]
        if users:
            users[-1].replace_input_with(node, node.args[0])
            return True
    return False


@fxpasses.graph_pass
def always_written_first(gm: fx.GraphModule) -> bool:
    """Writes keys to the front, whatever the position."""
    found = calls(gm, aten.index_put.default, aten.index_copy.default)
    for node in found:
        position = node.args[1][0] if node.target is aten.index_put.default else node.args[2]
        node.replace_input_with(position, call_before(node, aten.zeros_like.default, position))
    return bool(found)


def copied_then_changed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Changes a copy of its input, not the input itself."""
    y = x.clone()
    y[0].mul_(2)
    return y, x.sin()


@fxpasses.graph_pass
def writes_into_inputs(gm: fx.GraphModule) -> bool:
    """Scatters in-place into memory that does not belong to the graph."""
    found = calls(gm, aten.select_scatter.default)
    for node in found:
        target = node.args[0]
        while getattr(target, "target", None) is aten.clone.default:
            target = target.args[0]
        view = call_before(node, aten.select.int, target, *node.args[2:])
        call_before(node, aten.copy_.default, view, node.args[1])
        swap(node, target)
    return bool(found)


def _plain(module: Any, *inputs: Any) -> Workload:
    return lambda: (
        module() if isinstance(module, type) else module,
        [f() if callable(f) else f for f in inputs],
    )


_some = functools.partial(torch.randn, 3, 4)
_learning = functools.partial(torch.randn, 4, 4, requires_grad=True)

PLANTS = {
    "a step counter taken for one": Plant((always_the_first_step,), _plain(Averaged, _learning)),
    "an average taken for zero": Plant((average_from_zero,), _plain(Averaged, _learning)),
    "cosines kept from the first call": Plant(
        (tables_of_cosines,), _plain(turned, _learning, lambda: torch.arange(4.0))
    ),
    "NaN lost in relu": Plant((relu_by_comparison,), programs.mlp(activation=F.relu)),
    "a row masked wholly": Plant(
        (no_row_is_empty,), _plain(masked_rows, _learning, lambda: torch.ones(4, 4, dtype=torch.bool).tril())
    ),
    "sign of zero": Plant((adds_of_zero,), _plain(reciprocal_of_sum, _learning)),
    "overflow of a logarithm": Plant((plain_logarithm,), _plain(smooth_maximum, _learning)),
    "branch not taken": Plant(
        (other_branch,), _plain(programs.branches, lambda: torch.rand(3, 4)), training=False
    ),
    "branch not taken, gradients": Plant(
        (other_branch,), _plain(programs.branches, lambda: torch.rand(3, 4, requires_grad=True))
    ),
    "a loop's last round": Plant((one_round_more,), _plain(looped, _some), training=False),
    "detach dropped": Plant((detach_dropped,), _plain(two_heads, _learning, _learning)),
    "stride of a result": Plant((made_contiguous,), _plain(transposed_out, _some)),
    "input that is not contiguous": Plant((read_as_it_lies,), _columns),
    "batch of one": Plant((batch_of_one,), _plain(Normed, lambda: torch.randn(1, 5, 4))),
    "counts in bytes": Plant(
        (counts_in_bytes,),
        _plain(counted, _learning, lambda: torch.randint(0, 20, (4, 9), dtype=torch.uint8)),
    ),
    "kept keys read too early": Plant((cache_read_too_early,), cached, training=False),
    "kept keys in front": Plant((always_written_first,), cached, training=False),
    "writes into inputs": Plant((writes_into_inputs,), _plain(copied_then_changed, _some)),
}
