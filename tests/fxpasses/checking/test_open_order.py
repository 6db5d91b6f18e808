"""Which of equal elements an operator takes, where torch leaves that open."""

import pytest
import torch

from fxpasses import capture, pattern_pass
from fxpasses.checking.open_order import open_results
from fxpasses.testing import prove

TIES, ALL_OTHERS = torch.tensor([[1.0, 3.0, 3.0, 0.0]]), torch.tensor([[1.0, 3.0, 2.0, 0.0]])
OPERATORS = {
    "topk": lambda x: torch.topk(x, 2),
    "topk of a column": lambda x: torch.topk(x.T, 2, 0),
    "sort": lambda x: torch.sort(x, descending=True),
    "kthvalue": lambda x: torch.kthvalue(x, 3),
    "median": lambda x: torch.median(torch.cat([x, x[:, 1:2] + 1], 1), 1),
    "mode": lambda x: torch.mode(x, 1),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_indices_of_equal_elements_are_open(name):
    gm = capture(lambda x: (*OPERATORS[name](x), x + 1), TIES).forward
    assert open_results(gm, [TIES]) == {1}
    assert open_results(gm, [ALL_OTHERS]) == set()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.max(x, 1),
        lambda x: (x, x.argmax(1)),
        lambda x: torch.sort(x, stable=True),
        lambda x: torch.topk(x, 1, largest=False),
    ],
    ids=["max", "argmax", "stable sort", "what is taken is there once"],
)
def test_these_are_told(function):
    assert open_results(capture(function, TIES).forward, [TIES]) == set()


def test_what_is_computed_from_an_open_index_is_open():
    gm = capture(lambda x: (x.gather(1, torch.topk(x, 2).indices + 0), torch.topk(x, 2).values), TIES).forward
    assert open_results(gm, [TIES]) == {0}


def softmax_first(x):
    weights, chosen = x.softmax(-1).topk(2)
    return weights / weights.sum(-1, keepdim=True), chosen


def chosen_first(x):
    weights, chosen = x.topk(2)
    return weights.softmax(-1), chosen


def smallest_first(x):
    weights, chosen = x.topk(2, largest=False)
    return weights.softmax(-1), chosen


def test_a_router_may_choose_before_the_softmax():
    """Times 2**28, all probabilities but one are zeros."""
    item = pattern_pass(softmax_first, chosen_first, [torch.randn(5, 4)])
    proof = prove(item)
    assert proof.ok, proof


def test_a_router_that_chooses_others_is_found():
    proof = prove(pattern_pass(softmax_first, smallest_first, [torch.randn(5, 4)]))
    assert not proof.ok
