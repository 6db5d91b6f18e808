"""Sums in parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from fxpasses.checking import local
from fxpasses.checking.interpret import ExactRun, RoundedRun, Run
from fxpasses.checking.reordered import parts, parts_behind
from fxpasses.checking.tolerance import deviation
from fxpasses.checking.values import Reference, compare

aten = torch.ops.aten


def _image() -> torch.Tensor:
    return torch.randn(2, 3, 5, 5)


CALLS = {
    "mm": (aten.mm.default, lambda: (torch.randn(3, 7), torch.randn(7, 4))),
    "bmm": (aten.bmm.default, lambda: (torch.randn(2, 3, 7), torch.randn(2, 7, 4))),
    "addmm": (aten.addmm.default, lambda: (torch.randn(4), torch.randn(3, 7), torch.randn(7, 4))),
    "baddbmm": (
        aten.baddbmm.default,
        lambda: (torch.randn(2, 3, 4), torch.randn(2, 3, 7), torch.randn(2, 7, 4)),
    ),
    "sum": (aten.sum.default, lambda: (torch.randn(3, 4),)),
    "sum of dimensions": (aten.sum.dim_IntList, lambda: (torch.randn(3, 4, 5), [0, -1], True)),
    "sum of all": (aten.sum.dim_IntList, lambda: (torch.randn(3, 4), [])),
    "mean": (aten.mean.dim, lambda: (torch.randn(3, 4), [-1], True)),
    "mean of all": (aten.mean.default, lambda: (torch.randn(3, 4),)),
    "convolution": (
        aten.convolution.default,
        lambda: (_image(), torch.randn(4, 3, 3, 3), torch.randn(4), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    ),
}


def _table() -> torch.Tensor:
    return torch.randn(3, 4)


_ROWS = torch.tensor([[0, 1], [2, 1], [0, -1]])  # each row twice
_MASK = torch.tensor([[True, False, True, False]] * 3)

SCATTERS = {
    "index_put of rows": (
        aten.index_put.default,
        lambda: (_table(), [_ROWS], torch.randn(3, 2, 4), True),
    ),
    "index_put of columns": (
        aten.index_put.default,
        lambda: (_table(), [None, torch.tensor([0, 1, 2, 3, 3, 2, 1, 0])], torch.randn(3, 8), True),
    ),
    "index_put of two indices": (
        aten.index_put.default,
        lambda: (
            _table(),
            [torch.arange(3)[:, None], torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])],
            torch.randn(8),
            True,
        ),
    ),
    "index_put that is not looked at": (
        aten._unsafe_index_put.default,
        lambda: (_table(), [_ROWS], torch.randn(4), True),
    ),
    "index_put under a mask": (
        aten._unsafe_masked_index_put_accumulate.default,
        lambda: (_table(), _MASK[:, :, None], [torch.tensor([0, 9, 0, -9]).expand(3, 4)], torch.randn(4)),
    ),
    "scatter_add": (
        aten.scatter_add.default,
        lambda: (_table(), 1, torch.tensor([[3, 3, 0, 0]] * 2), torch.randn(3, 5)),
    ),
    "scatter_add to a number": (
        aten.scatter_add.default,
        lambda: (torch.randn(()), 0, torch.tensor(0), torch.randn(())),
    ),
    "scatter_reduce": (
        aten.scatter_reduce.two,
        lambda: (_table(), -1, torch.tensor([[3, 3, 0, 0]] * 3), _table(), "sum"),
    ),
    "index_add": (
        aten.index_add.default,
        lambda: (_table(), 0, torch.tensor([0, 2, 0, 2]), torch.randn(4, 4)),
        {"alpha": 3},
    ),
    "embedding": (
        aten.embedding_dense_backward.default,
        lambda: (torch.randn(3, 2, 4), _ROWS % 3, 5, -1, False),
    ),
    "embedding with padding": (
        aten.embedding_dense_backward.default,
        lambda: (torch.randn(3, 2, 4), _ROWS % 3, 5, 1, False),
    ),
    "embedding by frequency": (
        aten.embedding_dense_backward.default,
        lambda: (torch.randn(3, 2, 4), _ROWS % 3, 5, -1, True),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_largest_part_has_the_shape_of_the_result_and_is_not_smaller(name):
    target, made = CALLS[name]
    args = made()
    result, part = target(*args), parts(target, args, {}).largest
    bias = 4 * args[0].abs().max().item() if name in ("addmm", "baddbmm") else 0.0  # is no part
    bias = 4 * args[2].abs().max().item() if name == "convolution" else bias
    assert part.shape == result.shape
    assert (part >= result.double().abs() * (1 - 1e-5) - bias).all()


@pytest.mark.parametrize("name", SCATTERS)
def test_the_largest_part_of_a_scatter_is_that_of_what_it_adds(name):
    target, made, *kwargs = SCATTERS[name]
    args, keywords = made(), (kwargs or [{}])[0]
    found = parts(target, args, keywords)
    part = found.largest
    is_gradient = target is aten.embedding_dense_backward.default
    start = 0 if is_gradient else args[0]
    added = target(*args, **keywords) - start
    # How many updates each element gets: the same call on ones.
    ones = [torch.ones_like(a) if torch.is_tensor(a) and a.is_floating_point() else a for a in args]
    if is_gradient:
        ones[-1] = False
    counts = target(*ones) - (0 if is_gradient else 1)
    assert part.shape == added.shape
    assert (part[counts < 2] == 0).all()
    assert torch.equal(found.terms.float(), counts)
    assert (part >= added.double().abs() - 1e-5)[counts > 1].all()
    assert (counts > 1).any() == bool(added.dim())


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-50, 50)), min_size=1, max_size=20))
def test_parts_of_a_scatter_are_those_of_the_sum_of_each_element(updates):
    where, values = (torch.tensor(v) for v in zip(*updates, strict=True))
    part = parts(aten.index_add.default, (torch.full((3,), 1e6), 0, where, values.float()), {}).largest
    for position in range(3):
        terms = values[where == position].double()
        summed = parts(aten.sum.default, (terms,), {}).largest if len(terms) > 1 else torch.tensor(0.0)
        if len(terms) <= 8:  # no more than parts: every seam is looked at, of the one and of the other
            assert part[position] == summed
        else:
            assert part[position] >= terms.sum().abs()


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=8), st.data())
def test_no_seam_makes_a_larger_part(terms, data):
    seam = data.draw(st.integers(1, len(terms) - 1))
    values = torch.tensor(terms, dtype=torch.float64)
    part = parts(aten.sum.dim_IntList, (values.view(1, -1), [1]), {}).largest.item()
    assert part >= max(abs(sum(terms[:seam])), abs(sum(terms[seam:])), abs(sum(terms)))


def test_a_product_in_two_parts_is_no_fault_where_the_whole_is_exact():
    # Multiples of a half: the products are exact, sums of them are not always, and some are zero.
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        a, b = ((6 * torch.randn(24, 32, generator=generator)).round() / 2 for _ in range(2))
        a, b = a.bfloat16(), b.bfloat16().t().contiguous()
        gm = make_fx(lambda a, b: a @ b, tracing_mode="fake")(a, b)
        samples = [RoundedRun(gm, k)([a, b])[0] for k in range(10)]
        stable = [RoundedRun(gm, k, reordered="any")([a, b])[0] for k in range(10)]
        parts = a[:, :16] @ b[:16] + a[:, 16:] @ b[16:]
        exact = a.double() @ b.double()
        assert deviation(a @ b, exact, samples, parts, stable=stable) is None
        wrong = parts.clone()
        wrong[3, 4] += 16
        assert deviation(a @ b, exact, samples, wrong, stable=stable) is not None


def test_a_gradient_that_is_scattered_onto_another_one_is_no_fault():
    """The gradient of a tied embedding, with as many tokens as a made-up size brings."""

    def added(dense, tokens, gradient):
        return dense + torch.zeros_like(dense).index_put([tokens], gradient, True)

    alarms = []
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 64, (512,), generator=generator)
        tokens[:256] = 0  # padding
        gradient = torch.randn(512, 16, generator=generator)
        inputs = [torch.randn(64, 16, generator=generator), tokens, gradient]
        gm = make_fx(added, tracing_mode="fake")(*inputs)
        samples = [RoundedRun(gm, k)(inputs)[0] for k in range(10)]
        stable = [RoundedRun(gm, k, reordered="any")(inputs)[0] for k in range(10)]
        native, exact = added(*inputs), ExactRun(gm)(inputs)[0]
        straight = inputs[0].index_put([tokens], gradient, True)
        alarms.append(deviation(native, exact, samples, straight) is not None)
        assert deviation(native, exact, samples, straight, stable=stable) is None
        wrong = straight.clone()
        wrong[0, 3] -= gradient[5, 3] / 8
        assert deviation(native, exact, samples, wrong, stable=stable) is not None
    assert any(alarms)  # without the parts of the scatter


def test_what_is_not_summed_does_not_move():
    def scattered(x, index, updates):
        return torch.index_add(x, 0, index, updates)

    x, updates = torch.tensor([0.0, 0.1, 0.2, 0.3]), torch.tensor([0.1, 0.3, -0.5])
    inputs = [x, torch.tensor([1, 3, 3]), updates]
    gm = make_fx(scattered, tracing_mode="fake")(*inputs)
    runs = torch.stack([RoundedRun(gm, k, reordered="any")(inputs)[0] for k in range(10)])
    assert (runs[:, [0, 2]] == x[[0, 2]]).all()
    assert runs[:, 3].unique().numel() > 1


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.add.Tensor, (torch.ones(2), torch.ones(2))),
        (aten.sum.default, (torch.ones(3, dtype=torch.int64),)),
        (aten.sum.default, (torch.ones(()),)),
        (aten.index_put.default, (torch.ones(3), [torch.zeros(2, dtype=torch.int64)], torch.ones(2))),
        (
            aten.scatter_reduce.two,
            (torch.ones(3), 0, torch.zeros(2, dtype=torch.int64), torch.ones(2), "prod"),
        ),
        (
            aten.index_add.default,
            (_ROWS, 0, torch.tensor([0, 0]), _ROWS[:2]),
        ),
        (
            aten.convolution.default,
            (_image(), torch.ones(3, 1, 2, 2), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 3),
        ),
    ],
)
def test_what_has_no_parts(target, args):
    assert parts(target, args, {}) is None


def _one_hot(index, dtype):
    return (index[:, None] == torch.arange(16)).to(dtype)


ONE_SUM = {
    "scatter, then add": lambda x, i, g: (x + torch.zeros_like(x).index_put([i], g, True),),
    "scatter onto it": lambda x, i, g: (x.index_put([i], g, True),),
    "index_add": lambda x, i, g: (x.index_add(0, i, g),),
    "embedding": lambda x, i, g: (x + aten.embedding_dense_backward(g, i, 16, -1, False),),
    "product": lambda x, i, g: (x + _one_hot(i, g.dtype).t() @ g,),
    "product onto it": lambda x, i, g: (x.addmm(_one_hot(i, g.dtype).t(), g),),
    "sum": lambda x, i, g: (x + (_one_hot(i, g.dtype)[:, :, None] * g[:, None]).sum(0),),
}


def _one_sided(seed: int) -> list[torch.Tensor]:
    """Terms of one sign for a long time, then of the other: a small sum of large parts, exact in float32 until something is added."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(0, 16, (1024,), generator=generator)
    index[:512] = 0
    terms = torch.randn(1024, 8, generator=generator).abs().cumsum(0).fmod(3) + 1
    terms[256:512] *= -1
    terms[768:] *= -1
    return [torch.randn(16, 8, generator=generator) * 1e-3, index, terms]


@pytest.mark.parametrize("after", ONE_SUM)
@pytest.mark.parametrize("before", ONE_SUM)
def test_one_sided_sums_in_another_order_are_no_fault_and_a_lost_term_is(before, after):
    names = ["sum", "x", "index", "terms"]
    for seed in range(3):
        inputs = _one_sided(seed)
        reference = Reference(make_fx(ONE_SUM[before], tracing_mode="fake")(*inputs), inputs)
        assert compare(reference, make_fx(ONE_SUM[after], tracing_mode="fake")(*inputs), names) == []

        def without_the_last(x, index, terms):
            return ONE_SUM[after](x, index[:-1], terms[:-1])

        (found,) = compare(reference, make_fx(without_the_last, tracing_mode="fake")(*inputs), names)
        assert found.fault == "value"


ADDED_PRODUCTS = {
    "sum": lambda a, b, c: a + b + c,
    "difference": lambda a, b, c: a - (-b) + c,
    "the last one first": lambda a, b, c: c + (b + a),
    "scaled": lambda a, b, c: torch.add(a, c + b, alpha=1),
    "turned": lambda a, b, c: (a.t() + b.t()).t() + c,
    "in another shape": lambda a, b, c: (a.view(2, 3, 5) + b.view(2, 3, 5)).view(6, 5) + c,
}


@pytest.mark.parametrize("alone", [True, False], ids=["only additions change", "products change"])
@pytest.mark.parametrize("how", ADDED_PRODUCTS)
def test_products_that_become_one_are_no_fault_and_a_lost_one_is(monkeypatch, how, alone):
    """The products stay where something else uses them: then their sum is all that is compared, and their parts count."""
    names = [f"output {i}" for i in range(4)]

    def products(x, y, z, w):
        return x @ w, y @ w, z @ w

    def before(x, y, z, w):
        made = products(x, y, z, w)
        return (*(made if alone else ()), ADDED_PRODUCTS[how](*made))

    def after(x, y, z, w):
        made = products(x, y, z, w) if alone else ()
        return (*made, torch.cat([x, y, z], 1) @ torch.cat([w, w, w]))

    def without_the_last(x, y, z, w):
        made = products(x, y, z, w) if alone else ()
        return (*made, torch.cat([x, y], 1) @ torch.cat([w, w]))

    alarms = 0
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        inputs = []
        for _ in range(3):  # the terms of each product cancel
            half, rest = torch.randn(2, 6, 4, generator=generator)
            inputs.append(torch.cat([half, 1e-4 * rest - half], 1))
        inputs.append(torch.randn(4, 5, generator=generator).repeat(2, 1))
        reference = Reference(make_fx(before, tracing_mode="fake")(*inputs), inputs)
        candidate = make_fx(after, tracing_mode="fake")(*inputs)
        assert compare(reference, candidate, names) == []
        (found,) = compare(reference, make_fx(without_the_last, tracing_mode="fake")(*inputs), names)
        assert found.fault == "value"
        with monkeypatch.context() as patch:
            patch.setattr(local, "parts_behind", lambda *_: None)
            alarms += len(compare(reference, candidate, names))
    assert alarms == (5 if alone else 0)


def test_a_long_chain_of_sums_is_followed_without_recursion():
    def chain(x, w):
        total = x[0] @ w
        for each in x[1:]:
            total = total + each @ w
        return total

    inputs = [torch.randn(700, 2, 2), torch.randn(2, 2)]
    gm = make_fx(chain, tracing_mode="fake")(*inputs)
    run = Run(gm, keep=True)
    run(inputs)
    (last,) = gm.graph.find_nodes(op="output")[0].all_input_nodes
    known: dict = {}
    found = parts_behind(last, run.values, known)
    assert (found.terms == 1400).all()
    assert (found.largest >= chain(*inputs).double().abs()).all()
    assert parts_behind(last, {}, known) is found
