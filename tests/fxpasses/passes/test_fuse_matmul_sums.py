import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxpasses
from fxpasses.backend import fxpasses as backend
from fxpasses.passes import FuseMatmulSums
from tests.fxpasses.passes.support import (
    Wrapped,
    assert_golden,
    assert_left_alone,
    assert_trains,
    captured,
    rewrite,
)
from tests.fxpasses.passes.test_concat_matmuls import Recurrent, matmuls

PASS = FuseMatmulSums()
ANY = FuseMatmulSums(gain=0.0)
EXACT = (torch.float64, torch.float32)
X = torch.randn(3, 2, 8)
WEIGHT = torch.linspace(-1, 1, 320).reshape(8, 40)


def steps(x, weight):
    return (x[0] @ weight).sin() + (x[1] @ weight).exp() + (x[2] @ weight).tanh()


def test_golden():
    assert_golden(PASS, steps, X, WEIGHT.clone().requires_grad_())


@pytest.mark.slow
def test_results_and_gradients():
    assert_trains(PASS, Wrapped(steps, WEIGHT), X, dtypes=(*EXACT, torch.bfloat16))
    assert_trains(ANY, Recurrent(), torch.randn(5, 2, 4), dtypes=EXACT)


def test_each_weight_of_a_loop_has_one_product_for_its_gradient():
    gm = captured(Recurrent(), torch.randn(5, 2, 4))
    before = len(matmuls(gm))
    assert rewrite(ANY, gm)
    # Four matrices of the cells and one of the head, four steps fewer each; and sums of gradients of a state.
    assert before - len(matmuls(gm)) >= 5 * 4


def test_other_terms_stay():
    def tied(x, weight):
        return (
            steps(x, weight).sum()
            + (weight.sin() * 3).sum()
            + F.embedding(torch.tensor([1, 1, 0]), weight).sum()
        )

    assert_trains(PASS, Wrapped(tied, WEIGHT), X, dtypes=EXACT)


def test_terms_that_are_the_same_product():
    def f(a, b, c):
        matmul = a @ b
        return (matmul + matmul) + c @ b

    gm = captured(f, torch.randn(20, 2), torch.randn(2, 20), torch.randn(20, 2))
    assert rewrite(PASS, gm)
    a, b, c = torch.randn(20, 2), torch.randn(2, 20), torch.randn(20, 2)
    torch.testing.assert_close(gm(a, b, c)[0], f(a, b, c))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    inner=st.lists(st.integers(2, 4), min_size=2, max_size=5),
    flips=st.lists(st.booleans(), min_size=5, max_size=5),
    order=st.lists(st.integers(0, 9), min_size=8, max_size=8),
)
def test_sums_of_any_form(inner, flips, order):
    """Matmuls of other inner sizes, some transposed, added in any order."""
    operands = [
        (torch.randn(12, k), torch.randn(k, 13)) if not flip else (torch.randn(13, k), torch.randn(k, 12))
        for k, flip in zip(inner, flips, strict=False)
    ]

    def f(*flat):
        terms = [a @ b if len(a) == 12 else (a @ b).t() for a, b in zip(flat[::2], flat[1::2], strict=True)]
        for first, second in zip(order[::2], order[1::2], strict=True):
            if len(terms) > 1:
                terms.append(terms.pop(first % len(terms)) + terms.pop(second % len(terms)))
        return terms[0].sin()

    flat = [x.double() for pair in operands for x in pair]
    gm = captured(f, *flat)
    rewrite(ANY, gm)
    assert len(matmuls(gm)) == 1 or any(flips)
    torch.testing.assert_close(gm(*flat)[0], f(*flat))


def used_elsewhere(x, weight):
    a, b = x[0].t() @ weight[:2], x[1].t() @ weight[:2]
    return a + b, a.sin(), b


def checkpointed(x, weight):
    return checkpoint(lambda x: x[0].t() @ weight[:2] + x[1].t() @ weight[:2], x, use_reentrant=False)


@pytest.mark.parametrize(
    "function",
    [
        used_elsewhere,
        checkpointed,
        lambda x, w: x[0].t() @ w[:2] + w,
        lambda x, w: torch.add(x[0].t() @ w[:2], x[1].t() @ w[:2], alpha=2),
        lambda x, w: x[0].t() @ w[:2] + (x[1].t() @ w[:2]).double(),
        lambda x, w: x[0].t() @ w[:2] + (x[1].t() @ w[:2])[:1],
    ],
)
def test_left_alone(function):
    assert_left_alone(ANY, function, X, WEIGHT)


def test_left_alone_where_more_is_copied_than_is_saved():
    assert_left_alone(PASS, lambda x, w: x[0] @ w + x[1] @ w, X, WEIGHT)


def test_left_alone_with_symbolic_sizes():
    gm = captured(lambda x, y, w: x.t() @ w + y.t() @ w, X[0], X[1], WEIGHT[:2], dynamic=True)
    assert not rewrite(PASS, gm)


def test_memory_that_is_written_to_meanwhile():
    def f(x, weight):
        first = x[0].t() @ weight
        x.mul_(2)
        return first + x[0].t() @ weight

    options = {"passes": ["default", PASS], "compiler": "eager"}
    x = X.clone()
    torch.testing.assert_close(
        torch.compile(f, backend=backend, options=options)(x, WEIGHT[:2]), 3 * X[0].t() @ WEIGHT[:2]
    )


def chained(x, weight):
    for _ in range(4):
        x = (x @ weight).tanh()
    return x


def with_itself(x, weight):
    return weight @ weight + weight.t() @ weight + weight @ weight.t()


def weighted(x, weight):
    return torch.add(x @ weight, (x + 1) @ weight, alpha=3), torch.sub(x @ weight, (x + 1) @ weight)


@pytest.mark.slow
@pytest.mark.parametrize("function", [chained, with_itself, weighted])
def test_checks_of_values_know_sums_of_products(function):
    """Terms cancel, and the reference is exact at some elements by luck."""
    options = {"passes": ["default", ANY, "default"], "check": "values", "compiler": "eager"}
    fxpasses.reset_stats()
    for seed in range(4):
        torch._dynamo.reset()
        generator = torch.Generator().manual_seed(seed)
        x, weight = (torch.randn(n, 8, generator=generator).requires_grad_() for n in (3, 8))
        results = torch.compile(function, backend=backend, options=options)(x, weight)
        sum(r.sum() for r in (results if isinstance(results, tuple) else [results])).backward()
    assert fxpasses.stats().pass_changes["fuse_matmul_sums"] >= 4


@pytest.mark.slow
def test_checks_of_values_raise_no_alarm():
    torch._dynamo.reset()
    fxpasses.reset_stats()
    options = {"passes": ["default", PASS, "default"], "check": "values"}
    compiled = torch.compile(Wrapped(steps, WEIGHT), backend=backend, options=options)
    for _ in range(2):
        compiled(X).sum().backward()
    assert fxpasses.stats().pass_changes["fuse_matmul_sums"] == 1
