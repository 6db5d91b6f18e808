"""Arguments of calls that a plan may serve."""

import pytest
import torch

from fxpasses.plans._torch import PROPAGATED
from fxpasses.plans.arguments import described_arguments
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.loaded import Plan


def test_a_hint_of_aotautograd_is_no_attribute_of_an_argument():
    plain, hinted = torch.ones(2), torch.ones(2)
    setattr(hinted, PROPAGATED, {0})
    described = [described_arguments((x,), {}, lambda tensor: None)[0] for x in (plain, hinted)]
    assert described[0] == described[1]
    hinted.mine = 1
    with pytest.raises(NoPlan, match="attributes of its own"):
        described_arguments((hinted,), {}, lambda tensor: None)


def test_sizes_of_what_an_argument_is_a_view_of():
    plan = object.__new__(Plan)
    plan._accepts, plan._asked = lambda base: base.size(0) == 4, [(0, True)]
    assert plan.accepts([torch.ones(4, 2)[:2]])
    assert not plan.accepts([torch.ones(5, 2)[:2]])
    assert not plan.accepts([torch.ones(2, 2)])
