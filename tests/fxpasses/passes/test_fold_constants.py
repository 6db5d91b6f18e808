import torch

import fxpasses
from fxpasses.passes import FoldConstants
from tests.fxpasses.support import assert_same_results, run_pass, text, traced

X = torch.linspace(0, 1, 8).reshape(2, 4)
PASS = FoldConstants()


def positions(length):
    """A computation like that of relative position buckets: much work, small result."""
    distance = (torch.arange(length)[None, :] - torch.arange(length)[:, None]).abs()
    return torch.where(distance < 2, distance, (distance.float() + 1).log().long() + 2)


def test_uniform_values_become_full():
    gm = assert_same_results(PASS, lambda x: x * (torch.ones(2, 4) * 3 + 1), X)
    assert "aten.full.default([2, 4], 4.0)" in text(gm)


def test_long_computations_of_constants_are_done_once():
    gm = assert_same_results(PASS, lambda x: x[0] + positions(4), X)
    attributes = gm.graph.find_nodes(op="get_attr")
    assert [str(a.target).startswith("_folded_") for a in attributes] == [True]


def test_cheap_and_large_ones_are_left_to_the_kernel():
    assert not run_pass(PASS, traced(lambda x: x + (torch.arange(4) + 1), X))
    assert not run_pass(FoldConstants(max_bytes=8), traced(lambda x: x[0] + positions(4), X))


def test_positions_are_left_to_the_index_of_a_loop():
    def f(x, given):  # of transformers: the mask of padding, next to a causal one
        rows, columns = torch.arange(2)[:, None, None], torch.arange(4)[None, None, :]
        mask = given[rows, columns] & (columns <= torch.arange(4)[None, :, None])
        return torch.where(mask, x[:, None], -1.0)

    assert not run_pass(PASS, traced(f, X, torch.ones(2, 4, dtype=torch.bool)))


def test_inputs_are_never_constants():
    # A training step changes parameters, which are inputs here.
    gm = traced(lambda weight, x: x * (weight * 0 + 1), torch.ones(4), X)
    assert not run_pass(PASS, gm)


def test_memory_that_the_graph_writes_to_is_not_constant():
    def f(x):
        total = torch.zeros(4)
        for row in x:
            total.add_(row)
        return total * 2

    gm = traced(f, X)
    run_pass(PASS, gm)
    assert torch.equal(gm(X)[0], f(X))
    assert torch.equal(gm(X)[0], f(X))


def test_random_values_are_not_constants():
    assert not run_pass(PASS, traced(lambda x: x + (torch.rand(2, 4) * 0 + 1 + 2 + 3), X))


def test_negative_zero_is_not_taken_for_zero():
    def f(x):
        signed = torch.where(torch.arange(4) % 2 == 0, 0.0, -0.0) * 1.0
        return (x + 1) / signed

    assert_same_results(PASS, f, X)


def test_a_value_whose_memory_is_in_another_order_is_left():
    def f(x):  # of Funnel: positions, built in many calls and seen transposed
        return x.unsqueeze(1) + positions(4).float().view(2, 2, 4).transpose(0, 1)

    captured = fxpasses.capture(f, X, passes=[PASS], decompose=True)
    assert torch.equal(captured.forward(X)[0], f(X))
