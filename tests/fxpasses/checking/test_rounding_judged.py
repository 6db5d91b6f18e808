"""Rounding apart from equality: a rewrite that is the same function is held to what the graph before rounds."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxpasses
from fxpasses.checking.comparison.rounding import distance, less_precise
from fxpasses.checking.comparison.values import Reference, compare, value_names

aten, prims = torch.ops.aten, torch.ops.prims


def graph(function, *inputs):
    return make_fx(function)(*inputs)


def product(a, b):
    return aten.mm.default(a, b)


def in_bfloat16(a, b):
    return product(a.bfloat16(), b.bfloat16()).float()


def in_parts(a, b):
    half = a.shape[1] // 2
    return product(a[:, half:], b[half:]) + product(a[:, :half], b[:half])


def found(before, after, *inputs):
    gm = graph(before, *inputs)
    return compare(Reference(gm, inputs), graph(after, *inputs), value_names(gm, "inference"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_order_of_a_sum_is_as_precise(dtype):
    inputs = torch.randn(8, 64).to(dtype), torch.randn(64, 8).to(dtype)
    assert found(product, in_parts, *inputs) == []


def test_fewer_digits_are_told_by_how_much_and_where():
    (mismatch,) = found(product, in_bfloat16, torch.randn(8, 64), torch.randn(64, 8))
    assert "LESS PRECISE" in mismatch.problem
    assert "digits are lost at node" in mismatch.problem
    assert mismatch.calls


@pytest.mark.parametrize("seed", range(12))
def test_what_its_inputs_leave_open_is_no_fault(seed):
    """A sum of one element: where the graph before is right, it is by luck."""
    x = torch.randn(400, generator=torch.Generator().manual_seed(seed)) + 1e4

    def first_the_mean(x):
        return (x - x.mean()).sum()

    def last_the_mean(x):
        return x.sum() - x.mean() * 400

    assert less_precise(graph(first_the_mean, x), graph(last_the_mean, x), [x]) == {}


def test_a_cancellation_that_the_graph_before_avoids_is_one():
    x = torch.randn(64, 100) + 1e3

    def centred(x):
        return (x - x.mean(1, keepdim=True)).square().mean(1)

    def from_moments(x):
        return x.square().mean(1) - x.mean(1).square()

    found = less_precise(graph(centred, x), graph(from_moments, x), [x])
    assert found[0].times > 16


@pytest.mark.slow
def test_a_running_sum_in_bfloat16_is_less_precise_and_a_sum_in_parts_is_not():
    x = torch.rand(64, 512, generator=torch.Generator().manual_seed(0)).bfloat16()

    def in_parts(x, size):
        return functools.reduce(torch.add, [part.sum(1) for part in x.split(size, 1)])

    before = graph(lambda x: x.sum(1), x)
    assert less_precise(before, graph(lambda x: in_parts(x, 64), x), [x]) == {}
    assert less_precise(before, graph(lambda x: in_parts(x, 1), x), [x])


def test_each_small_element_of_an_elementwise_window_is_judged():
    x = torch.tensor([20.0, 1.0, 3e-12])
    found = less_precise(graph(torch.log1p, x), graph(lambda x: (x + 1).log(), x), [x])
    assert found[0].element == (2,)
    kept = graph(lambda x: aten.alias.default(torch.log1p(x)) * aten.full.default([3], 2.0), x)
    assert less_precise(kept, graph(lambda x: (x + 1).log() * 2, x), [x])[0].element == (2,)
    assert (
        less_precise(graph(lambda x: (x * 3).exp(), x), graph(lambda x: x.exp() * (x + x).exp(), x), [x])
        == {}
    )


def handed_on(function, how):
    return lambda *inputs: how(function(*inputs))


HANDED_ON = [lambda y: y.float(), lambda y: y.float().t()[1:], lambda y: y.abs().double()]


@pytest.mark.parametrize("how", HANDED_ON)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seed", range(8))
def test_few_digits_that_are_handed_on_in_a_wider_type_are_few(seed, dtype, how):
    generator = torch.Generator().manual_seed(seed)
    sizes = (16,), (8, 32), (32, 16)
    inputs = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    before, after = torch.addmm, lambda b, x, w: x @ w + b
    gm = graph(handed_on(before, how), *inputs)
    assert less_precise(gm, graph(handed_on(after, how), *inputs), inputs) == {}


@pytest.mark.parametrize("how", HANDED_ON)
def test_digits_that_are_lost_before_that_are_found(how):
    x = torch.rand(64, 512, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = graph(handed_on(lambda x: x.sum(1), how), x)
    one_by_one = graph(handed_on(lambda x: functools.reduce(torch.add, x.unbind(1)), how), x)
    assert less_precise(before, one_by_one, [x])
    in_float = graph(lambda x: x.float().sum(1), x)
    assert less_precise(in_float, graph(lambda x: x.sum(1).float(), x), [x])


def test_a_constant_in_the_type_of_the_graph_is_the_number_that_it_stands_for():
    x = torch.randn(20, dtype=torch.bfloat16)
    angles = torch.linspace(0, 3, 20)

    def computed(x):
        return x * angles.sin().bfloat16()

    folded, other = angles.sin().bfloat16(), (angles.sin() * 1.02).bfloat16()
    assert found(computed, lambda x: x * folded, x) == []
    assert found(computed, lambda x: x * other, x)


TYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES)
def test_one_unit_of_one_constant_is_a_difference(dtype):
    x, y = torch.randn(2, 3).to(dtype), torch.randn(4, 16).to(dtype)
    held = torch.tensor([1.0, 2.0, 3.0]).to(dtype)
    other = held.clone()
    other[0] += torch.finfo(dtype).eps
    assert found(lambda x: x * held, lambda x: x * other, x)
    assert found(lambda x: (x * held).sum(1), lambda x: (x * other).sum(1), x)
    # Large elements beside it do not hide it.
    table = torch.tensor([1000.0] + 15 * [1.0]).to(dtype)
    wrong = table.clone()
    wrong[3] = 1.125
    assert found(lambda y: (y * table).sum(1), lambda y: (y * wrong).sum(1), y)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_constant_that_was_rounded_once_is_right(dtype):
    y, weight, scale = (torch.randn(*shape).to(dtype) for shape in [(4, 16), (16, 8), (8,)])
    folded = (weight.double() * scale.double()).to(dtype)
    assert found(lambda y: (y @ weight) * scale, lambda y: y @ folded, y) == []
    assert found(lambda y: (y @ weight * scale).sum(1), lambda y: (y @ folded).sum(1), y) == []
    few = torch.rand(16).to(dtype) + 0.5
    more = (few.double() * 1.3).to(dtype)
    assert found(lambda y: (y * 1.3 * few).sum(1), lambda y: (y * more).sum(1), y) == []


@pytest.mark.parametrize("dtype", TYPES)
def test_what_a_graph_computes_from_nothing_may_be_a_constant_however_often_it_was_rounded(dtype):
    y = torch.randn(4, 16).to(dtype)
    angles = torch.linspace(0, 3, 16).to(dtype)
    computed = (angles * 3).exp() * 0.1
    assert found(lambda y: y * ((angles * 3).exp() * 0.1), lambda y: y * computed, y) == []
    full = float((torch.full((16,), 0.1, dtype=dtype) * 3)[0])
    one = lambda y: y * (torch.full((16,), 0.1, dtype=dtype) * 3)  # noqa: E731
    assert found(one, lambda y: y * torch.full((16,), full, dtype=dtype), y) == []


def test_small_values_show_what_cancels():
    x = torch.randn(40) * 2.0**-12
    assert found(torch.expm1, torch.expm1, x) == []
    (mismatch,) = found(torch.expm1, lambda x: x.exp() - 1, x)
    assert "LESS PRECISE" in mismatch.problem


def test_what_is_exact_is_held_to_the_type_of_its_result():
    x = torch.randn(64, 3).bfloat16()
    (mismatch,) = found(lambda x: x.cumsum(0, dtype=torch.float32), lambda x: x.cumsum(0).float(), x)
    assert "LESS PRECISE" in mismatch.problem


def test_what_a_saturated_activation_hides_is_found():
    """A new constant whose error shows on no input of this size."""
    bound = torch.full((40,), 50.0)
    (mismatch,) = found(
        lambda x: torch.tanh(x * 1e-3 + bound),
        lambda x: torch.tanh(x * 1e-3 + bound * 1.2),
        torch.randn(5, 40),
    )
    assert "inputs times 2**" in mismatch.problem


def test_a_constant_rounded_once_moves_what_underflows_too():
    weight, factor = torch.randn(12, 16), torch.rand(16) + 0.5
    folded = (weight.double() * factor.double()).float()
    x = torch.randn(3, 12, 12) * 32
    assert found(lambda x: ((x @ weight) * factor).softmax(-1), lambda x: (x @ folded).softmax(-1), x) == []


def test_beside_an_exact_zero_no_units_are_told():
    zeros = torch.zeros(2)
    assert str(distance(zeros, torch.tensor([0.5, 0.0]), [zeros.double()])) == "element [0]: 0 became 0.5"


def test_small_elements_are_judged_beside_large_ones():
    """Of a sigmoid's results near zero no digit is left, as (tanh(x / 2) + 1) / 2 makes them; to silu nothing happens."""
    x = torch.linspace(-20, 20, 200)
    by_tanh = graph(lambda x: (torch.tanh(x / 2) + 1) / 2, x)
    assert less_precise(graph(torch.sigmoid, x), by_tanh, [x])[0].times > 16
    divided = graph(lambda x: x / (1 + torch.exp(-x)), x)
    assert less_precise(graph(lambda x: torch.nn.functional.silu(x), x), divided, [x]) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_that_nearly_cancel_in_another_order(dtype):
    x = torch.randn(40, 30, dtype=dtype)
    x[20:] = -x[:20] * (1 + 1e-3 * torch.rand(20, 30, dtype=dtype))
    assert less_precise(graph(lambda x: x.sum(0), x), graph(lambda x: x.flip(0).sum(0), x), [x]) == {}


def attends(fused):
    def run(q, k, v):
        if fused:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return ((q * 0.5) @ k.mT).softmax(-1) @ v

    return run


def joint_graphs(*inputs):
    given = [x.requires_grad_() for x in inputs]
    return [fxpasses.capture(attends(fused), *given).joint for fused in (False, True)]


@pytest.mark.slow
def test_what_cancels_exactly_by_luck_may_be_what_rounding_leaves():
    """Behind a softmax that is saturated, gradients of the definition are exact zeros; a kernel for attention rounds what cancels there."""
    torch.manual_seed(0)
    inputs = [32 * torch.randn(1, 2, 8, 4) for _ in range(3)]
    before, after = joint_graphs(*inputs)
    given = [*(x.detach() for x in inputs), torch.randn(1, 2, 8, 4)]
    assert less_precise(before, after, given) == {}
    lost = graph(lambda *values: [2 * v for v in before(*values)], *given)  # and what does not cancel is seen
    assert set(less_precise(before, lost, given)) >= {0, 3}


def test_of_inputs_that_are_chosen_a_third_of_the_digits_has_to_be_lost():
    x = 500 + torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    before = graph(lambda x: x.softmax(-1).sum(-1), x)
    after = graph(lambda x: (x - x.logsumexp(-1, keepdim=True)).exp().sum(-1), x)
    assert less_precise(before, after, [x])
    assert less_precise(before, after, [x], chosen=True) == {}
    small = x * 2.0**-22
    before, after = graph(torch.log1p, x), graph(lambda x: (x + 1).log(), x)
    assert less_precise(before, after, [small], chosen=True)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("before", "after", "size"),
    [
        (lambda x, y: (x.exp() + (-x).exp() - 2) * y, lambda x, y: 4 * (x / 2).sinh().square() * y, 8),
        (lambda x, y: (2 * torch.sigmoid(2 * x) - 1) * y, lambda x, y: x.tanh() * y, 64),
    ],
    ids=["cosh", "tanh"],
)
def test_what_is_more_precise_in_float64_is_not_less(before, after, size, seed):
    """There is no wider type: how far the graph before is off is told by moving what its calls give, often enough for a few elements."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, size, size, dtype=torch.float64, generator=generator)
    x.view(-1)[:: size * size // 5] = 0.0  # among which a few numbers near zero have a magnitude of their own
    x.view(-1)[1] = 1e-5
    assert found(before, after, x, y) == []
