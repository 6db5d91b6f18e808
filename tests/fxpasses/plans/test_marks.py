"""Plans of arguments whose sizes were marked, to be fixed or not."""

import pytest
import torch
from torch import nn

import fxpasses
from fxpasses.plans.objects._torch_notes import dynamic_marks


def first(x):
    torch._dynamo.mark_dynamic(x, 0)


def weakly(x):
    torch._dynamo.maybe_mark_dynamic(x, [0, 1])


@pytest.mark.parametrize("mark", [first, weakly])
def test_a_graph_for_all_sizes_serves_other_processes_whether_or_not_they_mark(tmp_path, mark):
    """As Dynamo has it: a tensor of which nothing is marked asks for nothing."""
    model = nn.Linear(4, 4).requires_grad_(False)
    for number in range(3):
        torch._dynamo.reset()
        fxpasses.reset_stats()
        compiled = fxpasses.compile(model, cache=tmp_path)
        for size in (3, 5, 7):
            given = torch.randn(size, 4)
            if number == 1 or size == 3:
                mark(given)
            for _ in range(2):
                assert torch.allclose(compiled(given), model(given), atol=1e-6)
        stats = fxpasses.stats()
        assert (stats.graphs, stats.plans_written, stats.plans_refused) == (not number, not number, {})
        assert stats.plans_used == 1


def test_a_size_that_is_marked_as_fixed_has_plans_of_its_own(tmp_path):
    model = nn.Linear(4, 4).requires_grad_(False)
    for number in range(2):
        torch._dynamo.reset()
        fxpasses.reset_stats()
        compiled = fxpasses.compile(model, cache=tmp_path)
        for size in (3, 5):
            given = torch.randn(size, 4)
            torch._dynamo.mark_static(given, 0)
            assert torch.allclose(compiled(given), model(given), atol=1e-6)
        stats = fxpasses.stats()
        assert (stats.plans_written, stats.plans_used) == ((0, 2) if number else (2, 0))


def test_which_marks_are_known():
    plain, ranged, unbacked, hinted = (torch.ones(3, 4) for _ in range(4))
    assert dynamic_marks(plain) == ()
    torch._dynamo.mark_dynamic(ranged, 0, min=2, max=8)
    torch._dynamo.decorators.mark_unbacked(unbacked, 0)
    torch._dynamo.mark_dynamic(hinted, 0, hint_override=100)
    assert (dynamic_marks(ranged), dynamic_marks(unbacked), dynamic_marks(hinted)) == (None, None, None)
    torch._dynamo.mark_dynamic(plain, 1)
    torch._dynamo.mark_dynamic(plain, 0)
    assert dynamic_marks(plain) == (("_dynamo_dynamic_indices", "[0, 1]"),)
