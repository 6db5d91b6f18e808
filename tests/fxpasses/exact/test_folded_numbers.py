"""Numbers that a rewrite computes from those of the graph before: what was folded is the same function, and what was folded wrongly is not."""

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fxpasses import capture, graph_pass, pattern_pass
from fxpasses.checking.comparison.same_function import differences_in_float64
from fxpasses.exact import equivalent
from fxpasses.exact.fields import field
from fxpasses.exact.float_constants import residues_of_number
from fxpasses.exact.folded_numbers import folded_numbers, residues_of_sum
from fxpasses.testing import prove

LOG2_E = 1 / math.log(2)
FOLDED = {
    "mean and deviation of an image": (
        lambda x: (x / 255 - 0.485) / 0.229,
        lambda x: x * (1 / (255 * 0.229)) - 0.485 / 0.229,
    ),
    "two affine maps": (
        lambda x: (x * 0.485 + 0.3) * 0.229 + 0.013,
        lambda x: x * (0.485 * 0.229) + (0.3 * 0.229 + 0.013),
    ),
    "a product with a root": (lambda x: x * 96**-0.5 * 1.702, lambda x: x * (96**-0.5 * 1.702)),
    "three factors, and a sign": (
        lambda x: x * 0.013 / 0.229 * -0.485,
        lambda x: x * -(0.013 / 0.229 * 0.485),
    ),
    "powers": (lambda x: x * 0.97 * 0.97 * 0.97 * 0.97 * 0.97, lambda x: x * 0.97**5),
    "a sum of powers": (
        lambda x: (((x + 1) * 0.83 + 1) * 0.83 + 1) * 0.83 + x,
        lambda x: x * (1 + 0.83**3) + 0.83 * ((1 - 0.83**3) / (1 - 0.83)),
    ),
    "roots of rests": (
        lambda x: (x * 0.003 / (1 - 0.9**5)) / (x.abs() / (1 - 0.987**9)).sqrt(),
        lambda x: x / x.abs().sqrt() * (0.003 * (1 - 0.987**9) ** 0.5 / (1 - 0.9**5)),
    ),
    "powers of two": (lambda x: (x * 128**-0.5).exp(), lambda x: (x * (128**-0.5 * LOG2_E)).exp2()),
}


@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_folded_numbers_are_the_same_function(name, dtype):
    x = torch.randn(5).to(dtype)
    before, after = (capture(function, x, passes=[]).forward for function in FOLDED[name])
    assert equivalent(before, after, [x]).kind == "EQUAL"


@pytest.mark.parametrize("factor", [1.001, 1 + 1e-9])
@pytest.mark.parametrize("name", FOLDED)
def test_numbers_that_are_off_are_not(name, factor):
    before, after = FOLDED[name]
    x = torch.randn(5, dtype=torch.float64)
    graphs = [capture(f, x, passes=[]).forward for f in (before, lambda x: after(x * factor))]
    assert equivalent(*graphs, [x]).kind in ("APPROXIMATE", "DIFFERENT")


def test_the_softmax_of_attention_in_powers_of_two_is_proved():
    def powers_of_two(s):
        p = ((s - s.amax(-1, keepdim=True)) * (128**-0.5 * LOG2_E)).exp2()
        return p / p.sum(-1, keepdim=True)

    def usual(s):
        return (s * 128**-0.5).softmax(-1)

    s = torch.randn(3, 5)
    proof = prove(pattern_pass(usual, powers_of_two, [s], name="exp2"), usual, s)
    assert proof.ok, proof


def test_residues_are_those_of_the_formula():
    x = torch.randn(3)
    before = capture(lambda x: (x * 0.3 + 0.7) * 0.9, x, passes=[]).forward.graph
    after = capture(lambda x: x * 0.27 + math.nextafter(0.7 * 0.9, 1), x, passes=[]).forward.graph
    for number in (0, 1):
        one = field(number)
        (products,) = folded_numbers(one, before, after).values()
        assert residues_of_sum(one, products) == residues_of_number(one, float, 0.63)


def held_and_written(number, dtype, size, other):
    """A graph that holds a number as a tensor, and one that is written with it, times another one."""
    held = torch.full(size, number, dtype=dtype)
    x, value = torch.randn(4, 3).to(dtype), held.flatten()[0].item() * other
    before = make_fx(lambda x: (x + held).exp() * held)(x)
    return before, make_fx(lambda x: (x + value).exp() * value)(x), [x]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(), (1,), (4, 3)])
@pytest.mark.parametrize("number", [0.7, -1e-5, 2**-0.5, 3.25])
def test_a_tensor_of_one_number_is_that_number(number, size, dtype):
    before, after, inputs = held_and_written(number, dtype, size, 1.0)
    assert equivalent(before, after, inputs).kind == "EQUAL"
    assert not differences_in_float64(before, after, inputs)


@pytest.mark.parametrize("size", [(), (4, 3)])
def test_a_tensor_of_another_number_is_not(size):
    before, after, inputs = held_and_written(0.7, torch.float32, size, 1 + 1e-6)
    assert equivalent(before, after, inputs).kind == "APPROXIMATE"
    assert differences_in_float64(before, after, inputs)


RESTS = [0.999, 0.9999, 0.99, 0.95, 0.98, 0.3, 0.7, 1 / 3, 0.8675309]


@pytest.mark.parametrize("decay", RESTS)
def test_the_rest_of_a_decay_is_one_without_it(decay):
    for number in (0, 1):
        one = field(number)
        kept, rest = (residues_of_number(one, float, n) for n in (decay, 1 - decay))
        assert [(a + b) % p for a, b, p in zip(kept, rest, one.primes, strict=True)] == [1] * len(kept)


@pytest.mark.parametrize("decay", RESTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_moving_average_is_written_in_several_ways(decay, dtype):
    def average(s, w):
        return s * decay + w * (1 - decay)

    s, w = torch.randn(2, 5, dtype=dtype)
    before = make_fx(average)(s, w)
    for way in (
        lambda s, w: torch.lerp(s, w, 1 - decay),
        lambda s, w: torch.lerp(w, s, decay),
        lambda s, w: w - (w - s) * decay,
        lambda s, w: s.add(s - w, alpha=decay - 1),
    ):
        assert equivalent(before, make_fx(way)(s, w), [s, w]).kind == "EQUAL"
    for way in (
        lambda s, w: torch.lerp(s, w, 1 - decay + 1e-6),
        lambda s, w: s * decay + w * (1 - decay - 1e-6),
    ):
        assert equivalent(before, make_fx(way)(s, w), [s, w]).kind in ("APPROXIMATE", "DIFFERENT")


def horner(x):
    value = x[..., 0]
    for i in range(1, x.shape[-1]):
        value = value * 0.85 + x[..., i]
    return value


def decayed(x):
    return (x * (0.85 ** torch.arange(5, 0, -1)).to(x.dtype)).sum(-1) / 0.85


def positions(x):
    return x + (torch.arange(5) * 0.7).sin().to(x.dtype)


HELD = {
    "a recurrence": (horner, lambda k: 0.85 ** (4 - k)),
    "powers of integers": (decayed, lambda k: 0.85 ** (4 - k)),
    "a table of sines": (positions, lambda k: math.sin(0.7 * k)),
}


def held(name, dtype, factor=1.0, place=slice(None)):
    """A graph, and one that holds a tensor of numbers that were computed in double precision and rounded."""
    before, number = HELD[name]
    numbers = torch.tensor([number(k) for k in range(5)], dtype=torch.float64)
    numbers[place] *= factor
    numbers = numbers.to(dtype)
    x = torch.randn(4, 5).to(dtype)
    after = (lambda x: x + numbers) if name == "a table of sines" else (lambda x: (x * numbers).sum(-1))
    return make_fx(before)(x), make_fx(after)(x), [x]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HELD)
def test_a_tensor_of_rounded_numbers_is_what_it_was_rounded_from(name, dtype):
    before, after, inputs = held(name, dtype)
    assert equivalent(before, after, inputs).kind == "EQUAL"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", [slice(None), 1])
@pytest.mark.parametrize("name", HELD)
def test_a_tensor_that_is_off_by_more_is_not(name, place, dtype):
    off = 2 * max(torch.finfo(dtype).eps, 1e-13)  # in double precision it was computed itself
    before, after, inputs = held(name, dtype, 1 + off, place)
    assert equivalent(before, after, inputs).kind != "EQUAL"


@graph_pass
def weighs(gm):
    "Takes a product with the powers of a number for a recurrence."
    (x,), (output,) = gm.graph.find_nodes(op="placeholder"), gm.graph.find_nodes(op="output")
    gm.weights = torch.tensor([0.85 ** (4 - k) for k in range(5)], dtype=torch.bfloat16)
    with gm.graph.inserting_before(output):
        weighted = gm.graph.call_function(
            torch.ops.aten.mul.Tensor, (x, gm.graph.create_node("get_attr", "weights"))
        )
        total = gm.graph.call_function(torch.ops.aten.sum.dim_IntList, (weighted, [-1]))
    output.args[0][0].replace_all_uses_with(total)
    gm.graph.eliminate_dead_code()
    return True


def test_a_tensor_of_powers_is_right_at_numbers_that_the_graph_holds():
    proof = prove(weighs, horner, torch.randn(3, 5, dtype=torch.bfloat16))
    assert proof.ok, proof
