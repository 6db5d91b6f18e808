"""Where several comparisons meet in one result, each of them is looked at where the others do not hide it."""

import pytest
import torch

import fxpasses
from fxpasses.testing import prove

aten = torch.ops.aten


def gated(x, i):
    return torch.where((i == 7) & (x > 1.75), x * 3, x)


def counted(s, label):
    return ((s >= 0.8) & (label != 2)).sum() / (label != 2).sum().clamp(min=1)


def between(x, y):
    return torch.where((x > 4.5) & (y < -3.0), y * 0, x + y)


def three(i, j, x):
    return ((i == 30) & (j == 11) & (x < 0.25)) * x


def integers(most, count):
    return torch.cat([torch.tensor([most - 1, 0]), torch.randint(most, (count - 2,))])


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


CASES = {
    "a number beside a class": (
        gated,
        lambda n: (torch.randn(n), integers(10, n)),
        aten.gt.Scalar,
        1.75,
        1.8,
    ),
    "a class beside a number": (gated, lambda n: (torch.randn(n), integers(10, n)), aten.eq.Scalar, 7, 6),
    "a score": (counted, lambda n: (torch.rand(n), integers(5, n)), aten.ge.Scalar, 0.8, 0.81),
    "two numbers": (between, lambda n: (torch.randn(n), torch.randn(n)), aten.gt.Scalar, 4.5, 4.6),
    "the other one": (between, lambda n: (torch.randn(n), torch.randn(n)), aten.lt.Scalar, -3.0, -3.1),
    "one of three": (
        three,
        lambda n: (integers(40, n), integers(20, n), torch.rand(n) + 1),
        aten.lt.Scalar,
        0.25,
        0.3,
    ),
}


def with_another(target, old, new):
    def apply(gm):
        found = [n for n in gm.graph.find_nodes(op="call_function", target=target) if n.args[1] == old]
        for node in found:
            node.update_arg(1, new)
        return bool(found)

    return fxpasses.graph_pass(apply, name="another", graphs=["inference"])


@pytest.mark.parametrize("count", [8, 40])
@pytest.mark.parametrize("name", CASES)
def test_one_of_several_comparisons(name, count):
    model, make, target, old, new = CASES[name]
    assert not prove(with_another(target, old, new), model, *make(count)).ok


RIGHT = {
    "turned around": (
        lambda x, i: torch.where((i != 7) | (x <= 1.75), x, x * 3),
        lambda x, i: torch.where((i == 7) & (x > 1.75), x * 3, x),
    ),
    "a bound that holds": (
        lambda x, i: torch.where((i == 7) & (x > 0), x.clamp(min=0), x),
        lambda x, i: torch.where((i == 7) & (x > 0), x, x),
    ),
    "a condition that another one holds": (
        lambda x, i: ((x > 1.5) & (x > 0.5) & (i == 3)) * x,
        lambda x, i: ((x > 1.5) & (i == 3)) * x,
    ),
}


@pytest.mark.parametrize("count", [8, 40])
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_where_they_meet(name, count):
    before, after = RIGHT[name]
    inputs = torch.randn(count), integers(10, count)
    proof = prove(fxpasses.pattern_pass(before, after, inputs, name="right"), before, *inputs)
    assert proof.ok, proof


def five(a, b, c, d, i):
    return torch.where((a > 2.5) & (b < -2.0) & (c > 3.0) & (d < -2.5) & (i == 6), a + b, c)


def four(a, b, c, d, i):
    return ~((a <= 2.5) | (b >= -2.0) | (c <= 3.0) | (i != 6)) * d


def without(number):
    """A pass that forgets one of several conditions: the n-th."""

    @fxpasses.graph_pass(name="forgets")
    def forgets(gm):
        joined = [n for n in gm.graph.nodes if n.target in (aten.bitwise_and.Tensor, aten.bitwise_or.Tensor)]
        conditions = [*joined[0].args, *(n.args[1] for n in joined[1:])]
        joined[max(number - 1, 0)].replace_all_uses_with(
            joined[number - 2] if number > 1 else conditions[1 - number]
        )
        gm.graph.eliminate_dead_code()
        return True

    return forgets


@pytest.mark.parametrize("size", [1, 12])
@pytest.mark.parametrize("forgotten", range(5))
def test_one_of_five_conditions_is_forgotten(forgotten, size):
    inputs = [*torch.randn(4, size), torch.randint(30, (size,))]
    assert not prove(without(forgotten), five, *inputs).ok


@pytest.mark.parametrize("size", [1, 12])
@pytest.mark.parametrize("forgotten", range(4))
def test_one_of_four_alternatives_is_forgotten(forgotten, size):
    inputs = [*torch.randn(4, size), torch.randint(30, (size,))]
    assert not prove(without(forgotten), four, *inputs).ok


@pytest.mark.parametrize("size", [1, 12])
def test_conditions_in_another_order_are_the_same(size):
    def turned(gm):
        """Turns each conjunction around."""
        for node in gm.graph.find_nodes(op="call_function", target=aten.bitwise_and.Tensor):
            node.args = node.args[::-1]
        return True

    inputs = [*torch.randn(4, size), torch.randint(30, (size,))]
    proof = prove(fxpasses.graph_pass(turned, name="turned"), five, *inputs)
    assert proof.ok, proof
