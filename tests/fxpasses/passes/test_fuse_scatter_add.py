import torch
from torch.nn import functional as F

import fxpasses
from fxpasses.passes import FuseScatterAdd
from tests.fxpasses.support import run_pass, text, traced

PASS = FuseScatterAdd()
DENSE, INDEX, VALUES = torch.randn(5, 3), torch.tensor([1, 4, 1]), torch.randn(3, 3)


def scatter_and_add(dense, index, values):
    return dense + torch.zeros_like(dense).index_put([index], values, accumulate=True)


def test_scatter_starts_from_the_other_summand():
    gm = traced(scatter_and_add, DENSE, INDEX, VALUES)
    assert run_pass(PASS, gm)
    assert "index_put.default(dense_1, [index_1], values_1, True)" in text(gm)
    assert "aten.add" not in text(gm)
    torch.testing.assert_close(gm(DENSE, INDEX, VALUES)[0], scatter_and_add(DENSE, INDEX, VALUES))


def test_index_add_and_the_order_of_the_summands():
    def f(dense, index, values):
        return torch.zeros(5, 3).index_add(0, index, values) + dense

    gm = traced(f, DENSE, INDEX, VALUES)
    assert run_pass(PASS, gm)
    torch.testing.assert_close(gm(DENSE, INDEX, VALUES)[0], f(DENSE, INDEX, VALUES))


def test_left_alone():
    def overwrites(dense, index, values):
        return dense + torch.zeros(5, 3).index_put([index], values)

    def not_zero(dense, index, values):
        return dense + torch.ones(5, 3).index_put([index], values, accumulate=True)

    def scaled(dense, index, values):
        return torch.add(dense, torch.zeros(5, 3).index_put([index], values, accumulate=True), alpha=2)

    def broadcast(dense, index, values):
        return dense[0] + torch.zeros(5, 3).index_put([index], values, accumulate=True)

    def promotes(dense, index, values):
        return dense.double() + torch.zeros(5, 3).index_put([index], values, accumulate=True)

    def used_twice(dense, index, values):
        sparse = torch.zeros(5, 3).index_put([index], values, accumulate=True)
        return dense + sparse, sparse

    for f in (overwrites, not_zero, scaled, broadcast, promotes, used_twice):
        assert not run_pass(PASS, traced(f, DENSE, INDEX, VALUES)), f.__name__


def test_small_terms_are_not_lost_beside_a_large_one_in_low_precision():
    dense, index = torch.full((1, 1), 256.0).bfloat16(), torch.zeros(64, dtype=torch.int64)
    values = torch.full((64, 1), 0.5).bfloat16()
    assert dense + values[:1] == dense
    assert not run_pass(PASS, traced(scatter_and_add, dense, index, values))


def test_tied_embeddings_lose_a_pass_over_the_table():
    table = torch.randn(50, 8, requires_grad=True)
    tokens = torch.randint(50, (2, 6))

    def f(table, tokens):
        return F.cross_entropy((F.embedding(tokens, table) @ table.t()).flatten(0, 1), tokens.flatten())

    captured = fxpasses.capture(f, table, tokens, decompose=True)
    joint = captured.joint
    assert joint is not None
    assert run_pass(PASS, joint)
    f(table, tokens).backward()
    _, *gradients = joint(*captured.inputs, torch.ones(()))
    (gradient,) = [g for g in gradients if g is not None]
    torch.testing.assert_close(gradient, table.grad)
