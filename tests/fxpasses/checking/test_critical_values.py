"""Where what a graph compares is equal, and where digits are lost: what is wrong there is found, and what is right is not called wrong."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import fxpasses
from fxpasses.checking.comparison.rounding import less_precise
from fxpasses.checking.comparison.values import Reference, compare, precision_losses, value_names
from fxpasses.checking.critical.critical_inputs import critical_integers, critical_sizes
from fxpasses.checking.critical.critical_values import _changed_choices, at_critical_values
from fxpasses.graphs.rewriting import copy_graph
from fxpasses.testing import prove

aten = torch.ops.aten
FLIPPED = {
    aten.le.Scalar: aten.lt.Scalar,
    aten.lt.Scalar: aten.le.Scalar,
    aten.ge.Scalar: aten.gt.Scalar,
    aten.gt.Scalar: aten.ge.Scalar,
    aten.lt.Tensor: aten.le.Tensor,
}
ACTIVATIONS = {
    "hardswish": functional.hardswish,
    "hardtanh": functional.hardtanh,
    "hardsigmoid": functional.hardsigmoid,
    "clamp": lambda x: x.clamp(-0.1, 2),
    "relu6": functional.relu6,
    "shrinkage": lambda x: functional.hardshrink(x, 0.3),
    "maximum": lambda x: torch.maximum(x, x.detach().roll(1)),
    "a ratio": lambda x: x.exp().clamp(0.8, 1.2),
    "a gate": lambda x: x.sigmoid().clamp(0.1, 0.9) * x,
    "a bounded logit": lambda x: (x.tanh() * 3).clamp(-0.5, 0.7),
    "a square": lambda x: x.square().clamp(0.1, 0.9),
    "a length": lambda x: (x.square() + 0.01).sqrt().clamp(0.3, 0.9),
    "a softplus": lambda x: functional.softplus(x).clamp(0.1, 0.9),
    "a difference of log-softmaxes": lambda x: (
        (x.log_softmax(-1) - x.sin().log_softmax(-1)).exp().clamp(0.8, 1.2) * x
    ),
    "an interpolation": lambda x: functional.interpolate(functional.silu(x)[None], size=12, mode="linear")[
        0, :, :6
    ].clamp(min=0),
    "a norm of as many rows": lambda x: (
        x[:, :3] / x[:, :3].norm(dim=-1, keepdim=True).clamp(0.1, 3.0)
    ).repeat(1, 2),
    "a norm": lambda x: x / x.norm(dim=-1, keepdim=True).clamp(0.1, 3.0),
}


def found(before, after, inputs):
    return list(at_critical_values(Reference(before, inputs).rewriting(after)))


def worse(at):
    names = value_names(at.before, "joint")
    return precision_losses(Reference(at.before, at.inputs).rewriting(at.after), names)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_comparison_that_takes_the_other_side(name):
    activation = ACTIVATIONS[name]
    x, w = torch.randn(3, 6, requires_grad=True), torch.randn(6, 6)
    before = fxpasses.capture(lambda x, w: activation(x @ w), x, w).joint
    compared = [node.name for node in before.graph.nodes if node.target in FLIPPED and 20 not in node.args]
    assert compared
    inputs = [x.detach(), w, torch.randn(3, 6)]
    for name in compared:
        after = copy_graph(before)
        (node,) = [node for node in after.graph.nodes if node.name == name]
        node.target = FLIPPED[node.target]
        assert found(before, after, inputs)
        assert not found(before, copy_graph(before), inputs)


RIGHT = {
    "what is positive": (lambda x, w: (x @ w).exp().relu(), lambda x, w: (x @ w).exp()),
    "what is at most one": (
        lambda x, w: (x @ w - (x @ w).amax(-1, keepdim=True)).exp().clamp(-1, 1),
        lambda x, w: (x @ w - (x @ w).amax(-1, keepdim=True)).exp(),
    ),
    "a bound of what an exponential is of": (
        lambda x, w: torch.where((h := x @ w) < 0, h.exp().clamp_max(1), h),
        lambda x, w: torch.where((h := x @ w) < 0, h.exp(), h),
    ),
    "between two bounds": (
        lambda x, w: (x @ w).sigmoid().clamp(0, 1) + (x @ w).tanh().clamp(-1, 1),
        lambda x, w: (x @ w).sigmoid() + (x @ w).tanh(),
    ),
    "a logarithm of a number": (
        lambda x, w: ((x @ w).exp() > 1.5) * x.sum(),
        lambda x, w: ((x @ w) > 0.4054651081081644) * x.sum(),
    ),
    "a sum of exponentials": (
        lambda x, w: x.exp().sum(-1).clamp_min(1e-9) + w.sum(),
        lambda x, w: x.exp().sum(-1) + w.sum(),
    ),
    "a scale": (lambda x, w: ((x @ w) * 0.3 > 0.9) * x, lambda x, w: ((x @ w) > 3) * x),
    "two branches": (
        lambda x, w: torch.where(x @ w > 0, x @ w, 0.0),
        lambda x, w: torch.where(x @ w >= 0, x @ w, 0.0),
    ),
    "of one source": (lambda x, w: (2 * x > 6) * (x + w[:3]), lambda x, w: (4 * x > 12) * (x + w[:3])),
    "rounding": (lambda x, w: (x @ w).floor(), lambda x, w: -(-(x @ w)).ceil()),
    "a scale behind a mask": (
        lambda x, w: (x @ w * 0.5).masked_fill(x > 0.2, -3e38).softmax(-1),
        lambda x, w: ((x @ w).masked_fill(x > 0.2, -3e38) * 0.5).softmax(-1),
    ),
    "two matmuls of the same": (
        lambda x, w: (x @ w - (x @ w).amax(-1, keepdim=True)).sigmoid().clamp(0.1, 0.5),
        lambda x, w: (x @ w - (x @ w).amax(-1, keepdim=True)).sigmoid().clamp_min(0.1),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right(name):
    inputs = [torch.randn(3, 6), torch.randn(6, 6)]
    before, after = (fxpasses.capture(f, *inputs).forward for f in RIGHT[name])
    assert not found(before, after, inputs)


def test_a_factor_that_is_taken_into_weights_multiplies_infinity_by_zero_at_its_pole():
    def scaled(v, x, w):
        scale = (v + 1e-5).rsqrt()
        return (x.neg() @ w * scale).relu()

    def folded(v, x, w):
        scale = (v + 1e-5).rsqrt()
        return (x.neg() @ (w * scale)).relu()

    def clamped(v, x, w):
        scale = (v + 1e-5).rsqrt()
        return (x.neg() @ (w * scale)).clamp(0, 6)

    inputs = [torch.rand(6), torch.randn(3, 6), torch.randn(6, 6)]
    before, after, wrong = (fxpasses.capture(f, *inputs).forward for f in (scaled, folded, clamped))
    assert not any(at.differences for at in found(before, after, inputs))
    assert any(at.differences for at in found(before, wrong, inputs))


def test_an_epsilon_that_is_added_where_it_was_a_bound():
    inputs = [torch.randn(3, 6)]
    before = fxpasses.capture(lambda x: x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12), *inputs).forward
    after = fxpasses.capture(lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-12), *inputs).forward
    assert found(before, after, inputs)


SHIFTED = {
    "returned": lambda x, shift: shift(x),
    "where a ratio stands less": lambda x, shift: shift(x) + x[:, 0].exp(),
    "where all is one sum": lambda x, shift: shift(x).sum() + x[:, 0].exp().sum(),
}


@pytest.mark.parametrize("name", SHIFTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sum_of_exponentials_that_overflows_sooner(name, dtype):
    def shifted(x):
        most = x.amax(-1, keepdim=True).detach()
        return ((x - most).exp().sum(-1, keepdim=True).log() + most).squeeze(-1)

    def unshifted(x):
        return x.exp().sum(-1).log()

    def otherwise(x):
        return x.amax(-1) + (x - x.amax(-1, keepdim=True)).exp().sum(-1).log()

    inputs = [torch.randn(6, 6, dtype=dtype), torch.randn(6, 6, dtype=dtype)]
    before, wrong, right = (
        fxpasses.capture(lambda x, w, shift=shift: SHIFTED[name](x @ w, shift), *inputs).forward
        for shift in (shifted, unshifted, otherwise)
    )
    assert found(before, wrong, inputs)
    assert not found(before, right, inputs)


def test_an_overflow_that_a_choice_hides():
    def chosen(x, w):
        y = x @ w
        return torch.where(y > 20, y, y.exp().log1p())

    inputs = [torch.randn(4, 6), torch.randn(6, 3)]
    before, wrong = (
        fxpasses.capture(f, *inputs).forward for f in (chosen, lambda x, w: (x @ w).exp().log1p())
    )
    assert found(before, wrong, inputs)


REACH = {
    "a scale behind a product": (lambda a, b: (a / 8) @ b, lambda a, b: a @ b / 8, True),
    "a scale that is no power of two": (lambda a, b: (a * 0.3) @ b, lambda a, b: a @ b * 0.3, True),
    "a mean by its sum": (
        lambda a, b: b.mT - a.mean(-1, True),
        lambda a, b: b.mT - a.sum(-1, True) / 512,
        True,
    ),
    "a mean of squares by its sum": (
        lambda a, b: (a * a).mean(-1, True) + a,
        lambda a, b: (a * a).sum(-1, True) / 512 + a,
        True,
    ),
    "a scale before a product": (lambda a, b: a @ b / 8, lambda a, b: (a / 8) @ b, False),
    "a half behind a sum": (lambda a, b: a * 0.5 + b.mT * 0.5, lambda a, b: (a + b.mT) * 0.5, False),
    "a small factor behind a sum": (lambda a, b: a * 0.1 + b.mT * 0.1, lambda a, b: (a + b.mT) * 0.1, False),
    "a quarter behind a sum of products": (
        lambda a, b: a @ b / 4 + (a + 1) @ b / 4 + a @ (b + 1) / 4,
        lambda a, b: (a @ (b + 1) + (a + 1) @ b + a @ b) / 4,
        False,
    ),
    "a mean of few by its sum": (
        lambda a, b: b[:8] - a.mT[:8].mean(-1, True),
        lambda a, b: b[:8] - a.mT[:8].sum(-1, True) / 4,
        False,
    ),
    "factors in another order": (lambda a, b: b.mT - a * 0.02 * 5, lambda a, b: b.mT - a * 5 * 0.02, False),
    "a sum in another order": (lambda a, b: (a + b.mT) + a.sin(), lambda a, b: a + (b.mT + a.sin()), False),
    "a product in parts": (lambda a, b: a @ b, lambda a, b: a[:, :3] @ b[:3] + a[:, 3:] @ b[3:], False),
    "one over an exponential": (
        lambda a, b: b.mT + a * a.sigmoid(),
        lambda a, b: b.mT + a / (1 + a.neg().exp()),
        False,
    ),
}


@pytest.mark.parametrize("name", REACH)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_product_that_float16_does_not_hold_though_it_held_all_before(name, dtype):
    before, after, is_wrong = REACH[name]
    inputs = [torch.randn(4, 512).to(dtype), torch.randn(512, 4).to(dtype)]
    before, after = (make_fx(f, tracing_mode="fake")(*inputs) for f in (before, after))
    assert bool(found(before, after, inputs)) == (is_wrong and dtype is torch.float16)


def test_infinities_of_both_signs_behind_a_tanh_are_no_numbers_to_hold():
    inputs = [torch.randn(1, 8).half(), torch.randn(8, 1).half()]
    right = fxpasses.pattern_pass(
        lambda a, b: a @ b, lambda a, b: a[:, :4] @ b[:4] + a[:, 4:] @ b[4:], inputs, name="parts"
    )
    proof = prove(right, lambda a, b: (a @ b).tanh(), *inputs, decompose=False)
    assert proof.ok, proof


INTEGERS = {
    "a pointer that wraps late": (
        lambda x, i: (torch.where(i + 3 > 6, i - 3, i + 3), (i + 3) % 6),
        torch.tensor(0),
    ),
    "a count that is at least two": (
        lambda x, i: tuple(
            x / (torch.arange(4) < i[:, None]).sum(1, keepdim=True).clamp_min(least) for least in (2, 1)
        ),
        torch.tensor([4, 2, 3]),
    ),
    "an expanded pointer": (
        lambda x, i: (torch.where(i + 3 > 6, i - 3, i + 3), (i + 3) % 6),
        torch.zeros(1, 4, dtype=torch.int64).expand(3, 4),
    ),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_that_the_graph_holds(name):
    program, given = INTEGERS[name]
    inputs = [torch.randn(3, 6), given]
    wrong, before = (
        fxpasses.capture(lambda x, i, side=side: 0 * x[0, 0] + program(x, i)[side], *inputs).forward
        for side in (0, 1)
    )
    rewriting = Reference(before, inputs).rewriting(wrong)
    tried = list(critical_integers(rewriting, torch.Generator()))
    assert any(compare(Reference(before, values), wrong, value_names(before, "forward")) for values in tried)


@pytest.mark.parametrize("given", [torch.tensor([[1, 0], [1, 1]]), torch.tensor([0, 2, 5])])
def test_truth_values_and_offsets_stay_what_they_are(given):
    inputs = [torch.randn(2, 2), given]
    before = fxpasses.capture(lambda x, i: x.sum() * (i + 1), *inputs).forward
    after = fxpasses.capture(lambda x, i: x.sum() * (i + 2 - 1), *inputs).forward
    rewriting = Reference(before, inputs).rewriting(after)
    assert not list(critical_integers(rewriting, torch.Generator()))


def test_rounding_half_up():
    inputs = [torch.randn(3, 6), torch.randn(6, 6)]
    before = fxpasses.capture(lambda x, w: (x @ w).round(), *inputs).forward
    after = fxpasses.capture(lambda x, w: (x @ w + 0.5).floor(), *inputs).forward
    assert found(before, after, inputs)


def test_a_branch_between_two_numbers():
    inputs = [torch.randn(3, 6), torch.randn(6, 6)]

    def spiked(x, w):
        h = x @ w
        return torch.where((h > 2.53) & (h < 2.531), 2 * h, h)

    before, after = (fxpasses.capture(f, *inputs).forward for f in (spiked, lambda x, w: x @ w))
    assert found(before, after, inputs)


LOSING = {
    "log1p": (lambda x, w: (x @ w).exp().log1p(), lambda x, w: ((x @ w).exp() + 1).log()),
    "a variance": (
        lambda x, w: (x @ w).var(-1, correction=0),
        lambda x, w: (x @ w).square().mean(-1) - (x @ w).mean(-1).square(),
    ),
    "a distance": (
        lambda x, w: (x - w[:1]).square().sum(-1),
        lambda x, w: (x * x).sum(-1) + (w[:1] * w[:1]).sum(-1) - 2 * (x * w[:1]).sum(-1),
    ),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in LOSING),
        *(("a distance", dtype) for dtype in (torch.bfloat16, torch.float16)),
    ],
)
def test_digits_that_few_inputs_lose(name, dtype):
    torch.manual_seed(0)
    inputs = [torch.randn(16, 6, dtype=dtype), torch.randn(6, 6, dtype=dtype)]
    before, after = (make_fx(f)(*inputs) for f in LOSING[name])

    def is_worse(before, after):
        several = found(before, after, inputs)
        return any(worse(at) for at in several)

    assert is_worse(before, after)
    assert not is_worse(after, before)


def test_integers_that_a_type_does_not_have():
    mask = torch.ones(2, 2051, dtype=torch.bool)
    before = fxpasses.capture(lambda m: m.sum(1), mask).forward
    after = fxpasses.capture(lambda m: m.half().sum(1).long(), mask).forward
    assert "2051 became 2052" in str(less_precise(before, after, [mask])[0])


@pytest.mark.parametrize("scale", [0.05, 0.25, 3.0])
def test_ties_of_a_scaled_rounding_behind_a_clamp(scale):
    """They are at halves of the scale, and the bounds are numbers of the graph, too."""
    x = torch.randn(4, 6)
    before, after = (
        fxpasses.capture(lambda x: (whole(x / scale)).clamp(-128, 127) * scale, x).forward  # noqa: B023
        for whole in (torch.round, lambda v: (v + 0.5).floor())
    )
    assert found(before, after, [x])


def test_flags_that_rounding_turns_over():
    torch.manual_seed(0)
    x, w = torch.randn(64, 40), torch.randn(40, 40)
    before = fxpasses.capture(lambda x, w: x @ w > 5.3, x, w).forward
    parts = fxpasses.capture(lambda x, w: x[:, 20:] @ w[20:] + x[:, :20] @ w[:20] > 5.3, x, w).forward
    half = fxpasses.capture(lambda x, w: (x @ w).bfloat16() > 5.3, x, w).forward
    assert not less_precise(before, parts, [x, w])
    assert less_precise(before, half, [x, w])


def test_infinities_that_nothing_guards_against():
    x, scale = torch.tensor([1.0, float("inf")]), torch.tensor([0.0, 0.0])
    folded = fxpasses.capture(lambda x, s: (x - 1) * s, x, scale).forward
    spread = fxpasses.capture(lambda x, s: x * s - s * x, x, scale).forward
    guarded = fxpasses.capture(lambda x, s: torch.where(s > 0, x, s), x, scale).forward
    product = fxpasses.capture(lambda x, s: x * s, x, scale).forward
    inputs = [torch.tensor([float("inf"), 1.0]), torch.tensor([0.0, 1.0])]
    names = value_names(folded, "forward")
    assert not compare(Reference(folded, inputs, samples=0), spread, names)
    assert compare(Reference(guarded, inputs, samples=0), product, names)


def test_sizes_beyond_what_a_pass_changed():
    x = torch.randn(9, 3)
    positions = fxpasses.capture(lambda x: x + torch.arange(9.0)[:, None].clamp(max=128), x).forward
    free = fxpasses.capture(lambda x: x + torch.arange(9.0)[:, None], x).forward
    assert critical_sizes(positions, free) == [130]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float16, torch.bfloat16, torch.int32])
def test_sizes_that_a_type_cannot_count(dtype):
    def last(kind):
        return lambda x: x + torch.arange(x.shape[0], 0, -1, dtype=kind)[:, None].long()

    x = torch.randn(5, 2)
    before, after = (fxpasses.capture(last(kind), x, dynamic=True).forward for kind in (torch.int64, dtype))
    assert bool(critical_sizes(before, after)) is (dtype is not torch.int32)
    assert critical_sizes(after, before) == []


@pytest.mark.parametrize(("kind", "ok"), [(torch.int8, False), (torch.int32, True)])
def test_positions_that_are_counted_in_bytes(kind, ok):
    def positions(kind):
        return lambda x: x * torch.arange(x.shape[1], dtype=kind).to(x.dtype)

    x = torch.randn(2, 6)
    counted = fxpasses.pattern_pass(positions(torch.int64), positions(kind), [x], name="counted")
    assert prove(counted, positions(torch.int64), x, dynamic=True).ok is ok


def quantized(round):
    def straight_through(x):
        return (x + (round(x * 4) / 4 - x).detach()) * x

    return straight_through


def test_ties_are_tried_where_a_window_takes_values_that_are_made_of_each_other():
    x = torch.randn(4, 6, requires_grad=True)
    inputs = [x.detach(), torch.randn(4, 6)]
    before, after = (
        fxpasses.capture(quantized(round), x).joint for round in (torch.round, lambda v: (v + 0.5).floor())
    )
    assert found(before, after, inputs)


def test_values_that_nothing_relates_any_more_lose_no_digits():
    x, y = torch.randn(3, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    before, after = (
        fxpasses.capture(f, x, y).joint
        for f in (torch.logaddexp, lambda x, y: torch.maximum(x, y) + torch.log1p((-(x - y).abs()).exp()))
    )
    inputs = [x.detach(), y.detach(), torch.randn(3, 5)]
    for at in found(before, after, inputs):
        assert not worse(at)


@pytest.mark.parametrize("off", [3e-2, 3e-5])
def test_a_statistic_of_which_nothing_but_the_write_takes_the_value(off):
    def counts(x, mean):
        mean.copy_(x.mean(0) * 0.125)
        return x.sin()

    x, mean = torch.randn(5, 4), torch.zeros(4)
    before = fxpasses.capture(counts, x, mean).forward
    after = copy_graph(before)
    factor = next(n for n in after.graph.nodes if 0.125 in n.args)
    factor.args = (factor.args[0], 0.125 * (1 + off))
    after.recompile()
    rewriting = Reference(before, [x, mean]).rewriting(after)
    assert rewriting.suspects
    assert rewriting.joined is None
    assert rewriting.differences()


def test_choices_of_the_same_values_are_the_same_everywhere():
    """Only matmuls are others: no tie between them makes another function."""
    torch.manual_seed(0)
    inputs = [torch.randn(4, 4, dtype=torch.float64) for _ in range(3)]
    before = make_fx(lambda x, w, v: ((x @ w).relu() @ v,))(*inputs)

    def chooses(target, make, before=before):
        after = copy_graph(before)
        for node in after.graph.find_nodes(op="call_function", target=target):
            with after.graph.inserting_before(node):
                node.replace_all_uses_with(make(after.graph.call_function, *node.args))
            after.graph.erase_node(node)
        rewriting = Reference(before, inputs).rewriting(after)
        return [any(_changed_choices(rewriting, window)) for window in rewriting.windows]

    def negated(call, a, b):
        return call(aten.neg.default, (call(aten.mm.default, (call(aten.neg.default, (a,)), b)),))

    assert chooses(aten.mm.default, negated) == [False]
    assert chooses(aten.relu.default, lambda call, a: call(aten.clamp.default, (a, 0))) == [True]
    assert chooses(
        aten.relu.default, lambda call, a: call(aten.relu.default, (call(aten.abs.default, (a,)),))
    ) == [True]
    copied = make_fx(lambda x, w, v: ((x @ w).clone().relu() @ v,))(*inputs)
    assert not any(chooses(aten.clone.default, lambda call, a: a, copied))


@pytest.mark.parametrize("dim", [None, -1])
def test_a_norm_that_is_compared_inside_of_a_pattern_is_solved_for(dim):
    """Clipping with an epsilon is another function for norms between 0.99 and 1 alone: no number that all elements are reaches these."""

    def scale(x):
        return 1 / (x.norm(dim=dim, keepdim=dim is not None) + 0.01)

    def clipped(x):
        return x * scale(x).clamp(max=1)

    def wrong(x):
        return x * torch.where(x.norm(dim=dim, keepdim=dim is not None) > 1, scale(x), torch.ones(()))

    def right(x):
        return x * torch.minimum(scale(x), torch.ones(()))

    x = torch.randn(6, 5)
    verdicts = [
        str(prove(fxpasses.pattern_pass(clipped, other, [x]), clipped, x)) for other in (wrong, right)
    ]
    assert "DIFFERENT" in verdicts[0]
    assert "at numbers that the graph holds, or ties" in verdicts[0]
    assert "DIFFERENT" not in verdicts[1]
