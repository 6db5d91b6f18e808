"""Wrong numbers: constants, limits, masks and dimensions, at one of many places."""

from __future__ import annotations

import torch
from torch import fx

import fxpasses
from benchmarks.planted import programs
from benchmarks.planted.plant import Plant, call_before, calls, gradients, in_place_of, put_after, swap
from fxpasses.pass_manager.sites import claim

aten = torch.ops.aten


@fxpasses.graph_pass
def wrong_scale(gm: fx.GraphModule) -> bool:
    """Uses 0.35 for the attention factor 0.353553."""
    changed = False
    for node in calls(gm, aten.mul.Tensor, aten.mul.Scalar):
        if isinstance(node.args[1], float) and abs(node.args[1] - 8**-0.5) < 1e-6:
            node.args = (node.args[0], 0.35)
            changed = True
    return changed


@fxpasses.graph_pass
def another_epsilon(gm: fx.GraphModule) -> bool:
    """Multiplies the epsilon of one norm by ten."""
    for node in calls(gm, aten.add.Tensor):
        if isinstance(node.args[1], float) and node.args[1] in (1e-5, 1e-6, 1e-12):
            node.args = (node.args[0], node.args[1] * 10)
            return True
    return False


@fxpasses.graph_pass
def biased_variance(gm: fx.GraphModule) -> bool:
    """Divides a variance by n - 1 instead of n."""
    for node in calls(gm, aten.var_mean.correction):
        node.kwargs = {**node.kwargs, "correction": 1}
        return True
    return False


@fxpasses.graph_pass
def forgets_a_limit(gm: fx.GraphModule) -> bool:
    """Removes upper limits: small values do not show it."""
    found = calls(gm, aten.clamp_max.default, aten.minimum.default)
    for node in found:
        swap(node, node.args[0])
    return bool(found)


@fxpasses.graph_pass
def mask_off_by_one(gm: fx.GraphModule) -> bool:
    """Lets each position also see the next one."""
    for node in calls(gm, aten.le.Tensor, aten.ge.Tensor, aten.lt.Tensor, aten.le.Scalar, aten.ge.Scalar):
        value = node.meta["val"]
        if value.dim() >= 2 and value.dtype is torch.bool:
            a, b = node.args
            up = node.target in (aten.ge.Tensor, aten.ge.Scalar)
            node.args = (call_before(node, aten.add.Tensor, a, 1 if up else -1), b)
            return True
    return False


@fxpasses.graph_pass
def softmax_of_another_dimension(gm: fx.GraphModule) -> bool:
    """Sums a square softmax over the other dimension."""
    changed = False
    for node in calls(gm, aten.sum.dim_IntList):
        value = node.args[0].meta["val"]
        if (
            getattr(node.args[0], "target", None) is aten.exp.default
            and value.dim() == 4
            and value.shape[-1] == value.shape[-2]
        ):
            total = in_place_of(node, aten.sum.dim_IntList, node.args[0], [-2], True)
            put_after(total, aten.permute.default, total, [0, 1, 3, 2])
            changed = True
    return changed


@fxpasses.graph_pass
def last_row_never(gm: fx.GraphModule) -> bool:
    """Never looks up the last row of a table."""
    for node in calls(gm, aten.embedding.default):
        rows = node.args[0].meta["val"].shape[0]
        node.args = (
            node.args[0],
            call_before(node, aten.clamp_max.default, node.args[1], rows - 2),
            *node.args[2:],
        )
        return True
    return False


@fxpasses.graph_pass
def exchanges_norms(gm: fx.GraphModule) -> bool:
    """Uses the weight of one norm for another: both are ones in a new model."""
    weights = [
        n
        for n in gm.graph.find_nodes(op="placeholder")
        if str(n.target).startswith("primals") and n.meta["val"].shape == (16,) and n.users
    ]
    norms = [n for n in weights if any(u.target is aten.mul.Tensor for u in n.users)]
    if len(norms) < 2:
        return False
    a, b = norms[:2]
    users = list(a.users)
    for user in users:
        user.replace_input_with(a, b)
    return True


@fxpasses.graph_pass(numerics="bitwise")
def difference_is_zero(gm: fx.GraphModule) -> bool:
    """x - x as zero: wrong for NaN and infinities."""
    changed = False
    for node in calls(gm, aten.sub.Tensor):
        if node.args[0] is node.args[1]:
            value = node.meta["val"]
            in_place_of(node, aten.full.default, list(value.shape), 0.0, dtype=value.dtype)
            changed = True
    return changed


@fxpasses.graph_pass
def unsafe_softmax(gm: fx.GraphModule) -> bool:
    """A softmax without subtracting the maximum: large values overflow."""
    changed = False
    for node in calls(gm, aten.sub.Tensor):
        if isinstance(node.args[1], fx.Node) and node.args[1].target is aten.amax.default:
            swap(node, node.args[0])
            changed = True
    return changed


@fxpasses.graph_pass
def rounds_integers(gm: fx.GraphModule) -> bool:
    """Divides integers toward zero instead of down."""
    changed = False
    for node in calls(gm, aten.div.Tensor_mode):
        if node.kwargs.get("rounding_mode") == "floor":
            node.kwargs = {"rounding_mode": "trunc"}
            changed = True
    return changed


@fxpasses.graph_pass
def takes_less_for_less_or_equal(gm: fx.GraphModule) -> bool:
    """x <= 3 as x < 3, on integers."""
    found = calls(gm, aten.le.Scalar)
    for node in found:
        node.target = aten.lt.Scalar
    return bool(found)


@fxpasses.graph_pass
def wrong_at_site_17(gm: fx.GraphModule) -> bool:
    """-(-x) as x, but if x is y + 17, drops one sign only."""
    changed = False
    for node in calls(gm, aten.neg.default):
        inner = node.args[0]
        if inner.target is aten.neg.default and claim(node):
            x = inner.args[0]
            swap(node, inner if x.target is aten.add.Tensor and x.args[1] == 17 else x)
            changed = True
    return changed


@fxpasses.graph_pass
def wrong_at_place_17(gm: fx.GraphModule) -> bool:
    """Like ``wrong_at_site_17``, but does not claim its sites."""
    changed = False
    for node in calls(gm, aten.neg.default):
        inner = node.args[0]
        if inner.target is aten.neg.default:
            x = inner.args[0]
            swap(node, inner if x.target is aten.add.Tensor and x.args[1] == 17 else x)
            changed = True
    return changed


@fxpasses.graph_pass
def wrong_factor_at_one_site(gm: fx.GraphModule) -> bool:
    """x * (k + 2) as (x * 2) * (k + 2) / 2, with a factor that is wrong by 1e-4 for one k."""
    changed = False
    for node in calls(gm, aten.mul.Tensor):
        k = node.args[1]
        if isinstance(k, int) and k > 1 and claim(node):
            twice = call_before(node, aten.mul.Tensor, node.args[0], 2)
            node.args = (twice, k / 2 * (1.0001 if k == 31 else 1.0))
            changed = True
    return changed


@fxpasses.graph_pass
def wrong_gradient_at_one_site(gm: fx.GraphModule) -> bool:
    """1 - y * y as (1 - y) * (1 + y), but for the seventh tanh (1 - y) * (1.01 + y)."""
    changed = False
    for position, node in enumerate(gradients(calls(gm, aten.sub.Tensor))):
        square = node.args[1]
        if (
            node.args[0] == 1
            and square.target is aten.mul.Tensor
            and square.args[0] is square.args[1]
            and claim(node)
        ):
            y = square.args[0]
            more = call_before(node, aten.add.Tensor, y, 1.01 if position == 6 else 1.0)
            less = call_before(node, aten.sub.Tensor, call_before(node, aten.full_like.default, y, 1.0), y)
            in_place_of(node, aten.mul.Tensor, less, more)
            changed = True
    return changed


@fxpasses.graph_pass
def wrong_in_the_second_layer(gm: fx.GraphModule) -> bool:
    """Multiplies every product by one, and the sixth by 1.002, without claiming sites."""
    products = [
        n
        for n in calls(gm, aten.mm.default, aten.addmm.default)
        if not fxpasses.graphs.provenance.is_backward(n)
    ]
    for position, node in enumerate(products):
        put_after(node, aten.mul.Tensor, node, 1.002 if position == 5 else 1.0)
    return bool(products)


@fxpasses.graph_pass
def sine_inside(gm: fx.GraphModule) -> bool:
    """Replaces sines with cosines in the subgraphs that operators call."""
    changed = False
    for inner in gm.modules():
        if isinstance(inner, fx.GraphModule) and inner is not gm:
            for node in calls(inner, aten.sin.default):
                node.target = aten.cos.default
                changed = True
            inner.recompile()
    return changed


def nothing_left(x: torch.Tensor) -> torch.Tensor:
    """A difference that is zero for all finite values."""
    return x.cos().sin() + (x - x)[0]


def buckets(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Division and comparison of integers."""
    bucket = torch.div(index, 3, rounding_mode="floor") + (index <= 3).to(torch.int64)
    return x * bucket


def _buckets() -> tuple[object, list[torch.Tensor]]:
    return buckets, [torch.randn(8, requires_grad=True), torch.arange(-4, 4)]


PLANTS = {
    "a factor of attention": Plant((wrong_scale,), programs.attention()),
    "an epsilon": Plant((another_epsilon,), programs.hub("llama")),
    "a biased variance": Plant((biased_variance,), programs.zoo("gpt")),
    "a limit forgotten": Plant((forgets_a_limit,), programs.function(programs.saturated, (4, 4))),
    "a mask off by one": Plant(
        (mask_off_by_one,), programs.attention(), options={"passes": [mask_off_by_one]}
    ),
    "the same in gpt2": Plant(
        (mask_off_by_one,), programs.hub("gpt2"), options={"passes": [mask_off_by_one]}
    ),
    "softmax of another dimension": Plant((softmax_of_another_dimension,), programs.hub("bert")),
    "a table's last row": Plant((last_row_never,), programs.hub("gpt2")),
    "two norms exchanged": Plant((exchanges_norms,), programs.mlp()),
    "x - x = 0": Plant((difference_is_zero,), programs.function(nothing_left, (6, 2))),
    "softmax without its maximum": Plant((unsafe_softmax,), programs.hub("gpt2")),
    "integers rounded otherwise": Plant((rounds_integers,), lambda: _buckets()),
    "less for less or equal": Plant((takes_less_for_less_or_equal,), lambda: _buckets()),
    "one of 40 sites": Plant(
        (wrong_at_site_17,), programs.function(programs.forty, (4,)), at="17: ", alone=True
    ),
    "one of 40 places": Plant((wrong_at_place_17,), programs.function(programs.forty, (4,)), at="neg_35"),
    "one of 40 factors, by 1e-4": Plant(
        (wrong_factor_at_one_site,), programs.function(programs.forty_twice, (4,)), at="29: ", alone=True
    ),
    "one of 40 gradients": Plant(
        (wrong_gradient_at_one_site,), programs.function(programs.forty_tanh, (4,)), alone=True
    ),
    "one product of many": Plant(
        (wrong_in_the_second_layer,), programs.hub("gpt2"), at="'model.transformer.h.1"
    ),
    "inside of a branch": Plant((sine_inside,), programs.function(programs.branches, (3, 4)), training=False),
}
