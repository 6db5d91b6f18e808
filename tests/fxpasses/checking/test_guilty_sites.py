"""Of many match sites of a pass, those that are wrong are named: where each is off by little, too, and where there are several."""

import pytest
import torch

import fxpasses
from fxpasses.checking.faults import blame
from fxpasses.checking.faults.blame import _wrong_alone
from fxpasses.pass_manager.sites import claim

aten = torch.ops.aten


def forty_factors(x):
    total = x
    for k in range(40):
        total = total + (x * (k + 2)).sin() / 40
    return total


def with_wrong_factors(wrong):
    @fxpasses.graph_pass(graphs=["inference"])
    def in_two_steps(gm):
        """x * k as (x * 2) * (k / 2)."""
        for node in gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
            k = node.args[1]
            if isinstance(k, int) and claim(node):
                with gm.graph.inserting_before(node):
                    twice = gm.graph.call_function(aten.mul.Tensor, (node.args[0], 2))
                twice.meta = dict(node.meta)
                node.args = (twice, k / 2 * (1.0001 if k - 2 in wrong else 1.0))
        return True

    return in_two_steps


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [(29,), (7, 29), (0, 1, 39)])
def test_wrong_sites_are_named(wrong, tmp_path, monkeypatch):
    monkeypatch.setattr(blame, "_SECONDS", 60.0)  # whatever else the machine does
    options = {
        "passes": [with_wrong_factors(wrong)],
        "check": "values",
        "compiler": "eager",
        "report": str(tmp_path),
    }
    x = torch.linspace(-2, 2, 4)
    with pytest.raises(fxpasses.ValueMismatchError) as raised, torch.no_grad():
        torch.compile(forty_factors, backend="fxpasses", options=options)(x)
    assert [site.index for site in raised.value.sites] == list(wrong)


@pytest.mark.parametrize(("wrong", "count"), [((2,), "1"), (range(6), "or more")])
def test_a_search_that_ended_early_does_not_call_the_others_right(wrong, count, tmp_path, monkeypatch):
    monkeypatch.setattr(blame, "_SECONDS", 0.0)  # it asks eight times about six sites

    def six_factors(x):
        return sum((x * (k + 2)).sin() for k in range(6))

    passes = [with_wrong_factors(wrong)]
    options = {"passes": passes, "check": "values", "compiler": "eager", "report": str(tmp_path)}
    x = torch.linspace(-2, 2, 4)
    with pytest.raises(fxpasses.ValueMismatchError) as raised, torch.no_grad():
        torch.compile(six_factors, backend="fxpasses", options=options)(x)
    assert set(wrong).issuperset(site.index for site in raised.value.sites)
    assert f"{count} of 6 match sites" in str(raised.value)


@pytest.mark.parametrize("wrong", [(), (3,), (0, 99), tuple(range(100))])
def test_groups_without_a_wrong_one_are_asked_about_once(wrong):
    asked = []

    def fails(indices):
        asked.append(indices)
        return not set(wrong).isdisjoint(indices)

    assert _wrong_alone(list(range(100)), fails) == list(wrong)
    assert len(asked) <= max(1, min(199, 15 * len(wrong)))
