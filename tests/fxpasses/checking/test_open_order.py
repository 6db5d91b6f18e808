"""Which of equal elements an operator takes, where torch leaves that open."""

import pytest
import torch

from fxpasses import capture, pattern_pass
from fxpasses.checking.comparison.open_order import tie_dependent_outputs
from fxpasses.checking.comparison.rounding import less_precise
from fxpasses.checking.comparison.values import Reference, compare, value_names
from fxpasses.graphs.rewriting import copy_graph
from fxpasses.testing import prove

aten = torch.ops.aten

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
    assert tie_dependent_outputs(gm, [TIES]) == {1}
    assert tie_dependent_outputs(gm, [ALL_OTHERS]) == set()


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
    assert tie_dependent_outputs(capture(function, TIES).forward, [TIES]) == set()


def test_what_is_computed_from_an_open_index_is_open():
    gm = capture(lambda x: (x.gather(1, torch.topk(x, 2).indices + 0), torch.topk(x, 2).values), TIES).forward
    assert tie_dependent_outputs(gm, [TIES]) == {0}


def test_a_call_that_still_stands_but_has_no_use_any_more_is_not_kept():
    gm = capture(lambda x: torch.topk(x, 2).indices + 1, TIES).forward
    after = copy_graph(gm)
    (add,) = after.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    with after.graph.inserting_before(add):
        order = after.graph.call_function(aten.argsort.default, (next(iter(after.graph.nodes)), -1, True))
        add.args = (after.graph.call_function(aten.slice.Tensor, (order, 1, 0, 2)), 1)
    assert tie_dependent_outputs(gm, [TIES], gm) == set()
    assert tie_dependent_outputs(gm, [TIES], after) == {0}


def test_rows_of_a_table_at_open_indices_are_not_called_less_precise():
    table, ties = torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([[-1.0, 0.0, 0.0, -2.0]])
    before = capture(lambda x, e: e[torch.topk(x, 1).indices], ties, table).forward
    after = capture(lambda x, e: e[3 - torch.topk(x.flip(1), 1).indices], ties, table).forward
    assert not torch.equal(before(ties, table)[0], after(ties, table)[0])
    assert not less_precise(before, after, [ties, table])


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


def test_which_nan_is_taken_is_open():
    several, one = torch.tensor([[1.0, float("nan"), float("nan")]]), torch.tensor([[1.0, float("nan"), 0.0]])
    gm = capture(lambda x: (*torch.topk(x, 2), x + 1), several).forward
    assert tie_dependent_outputs(gm, [several]) == {1}
    assert tie_dependent_outputs(gm, [one]) == set()


ROUTERS = {
    "of probabilities": lambda s: s.softmax(-1).topk(2).indices,
    "of logarithms of them": lambda s: s.log_softmax(-1).topk(2).indices,
    "of scores moved to their mean": lambda s: (s - s.mean(-1, keepdim=True)).topk(2).indices,
}


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_may_choose_by_its_scores(name):
    w, x, experts = torch.randn(3, 4), torch.randn(6, 4), torch.randn(3, 4, 4)

    def routed(choose):
        def model(w, x, experts):  # they are taken in this order
            scores = x @ w.t()
            chosen = choose(scores)
            gates = scores.gather(-1, chosen).softmax(-1)
            return (gates[..., None] * (x[:, None, None] @ experts[chosen])[:, :, 0]).sum(1)

        return model

    inputs = [v.requires_grad_() for v in (w, x, experts)]
    taken = [
        lambda s: ROUTERS[name](s),
        lambda s: s.topk(2).indices,
        lambda s: s.topk(2, largest=False).indices,
    ]
    before, right, wrong = (capture(routed(choose), *inputs).joint for choose in taken)
    names = value_names(before, "joint")
    bad = [v.detach().clone() for v in inputs]
    bad[0][0, 0] = float("inf")
    for given in (bad, [bad[0] * float("nan"), *bad[1:]]):
        values = [*given, torch.randn(6, 4)]
        assert compare(Reference(before, values, samples=0), right, names) == []
    assert compare(Reference(before, [*(v.detach() for v in inputs), torch.randn(6, 4)]), wrong, names)


def _masked(fill, scale=1):
    def route(x, bias):
        biased = x.sigmoid() + bias
        masked = biased.masked_fill(torch.arange(4) < 2, fill)
        return x.gather(1, torch.topk(masked * scale, 2, sorted=False).indices)

    return route


def test_an_element_that_is_not_among_the_equal_ones_is_no_open_choice():
    x, bias = torch.tensor([[1.0, -1.0, 0.5, 2.0]]), torch.tensor([0.0, 0.0, -3.0, -4.0])
    zeros, infinite = (capture(_masked(fill), x, bias).forward for fill in (0.0, float("-inf")))
    assert (
        tie_dependent_outputs(zeros, [x, bias], infinite) == set()
    )  # negative scores are below masked zeros
    assert tie_dependent_outputs(zeros, [x, bias], zeros) == set()
    doubled, tripled = (capture(_masked(0.0, scale), x, bias).forward for scale in (2, 3))
    assert tie_dependent_outputs(doubled, [x, bias], tripled) == {0}  # either of the masked zeros


def test_a_mask_value_that_negative_scores_fall_below_is_found():
    x, bias = torch.tensor([[1.0, -1.0, 0.5, 2.0]]), torch.zeros(4)
    zeros, infinite = (capture(_masked(fill), x, bias).forward for fill in (0.0, float("-inf")))
    found = compare(Reference(zeros, [x, bias - 2]), infinite, value_names(zeros, "inference"))
    assert [mismatch.position for mismatch in found] == [0]
