"""Integers that are alone in their input, such as a counter of steps."""

import pytest
import torch

import fxpasses
from fxpasses import capture
from fxpasses.checking.comparison.values import Reference
from fxpasses.checking.critical.critical_inputs import critical_integers
from fxpasses.testing import prove

aten = torch.ops.aten


def grows(count, scale):
    count = count + 1
    return torch.where(count % 5 == 0, scale * 2, scale), count


@fxpasses.graph_pass(numerics="bitwise")
def equal_to_the_interval(gm):
    "Wrong on purpose: every fifth step is not the fifth one alone."
    nodes = gm.graph.find_nodes(op="call_function", target=aten.remainder.Scalar)
    for node in nodes:
        (test,) = node.users
        with gm.graph.inserting_before(test):
            new = fxpasses.insert_call(gm.graph, aten.eq.Scalar, node.args, {}, like=test)
        test.replace_all_uses_with(new)
        gm.graph.erase_node(test)
    return bool(nodes)


def test_the_integers_next_to_those_that_the_graph_holds_are_tried():
    inputs = [torch.tensor(4), torch.tensor(1.0)]
    before = capture(grows, *inputs).forward
    after = capture(grows, *inputs, passes=[equal_to_the_interval]).forward
    rewriting = Reference(before, inputs, samples=0).rewriting(after)
    tried = {int(values[0]) for values in critical_integers(rewriting, torch.Generator().manual_seed(0))}
    assert {4, 9} <= tried  # ten, minus the one that is added


def test_a_counter_of_which_the_example_shows_nothing():
    proof = prove(equal_to_the_interval, grows, torch.tensor(4), torch.tensor(1.0))
    assert not proof.ok
    with pytest.raises(fxpasses.testing.WrongPassError, match="integers that the graph holds"):
        proof.raise_if_wrong()


def test_integers_on_which_no_changed_call_depends_are_left_alone():
    inputs = [torch.tensor(4), torch.tensor(1.0), torch.tensor(7)]
    function = lambda count, scale, other: (*grows(count, scale), other * 3)  # noqa: E731
    before = capture(function, *inputs).forward
    after = capture(function, *inputs, passes=[equal_to_the_interval]).forward
    rewriting = Reference(before, inputs, samples=0).rewriting(after)
    tried = list(critical_integers(rewriting, torch.Generator().manual_seed(0)))
    assert tried
    assert not [
        values for values in tried if (int(values[0]), float(values[1])) == (4, 1.0) and values[2] != 7
    ]
