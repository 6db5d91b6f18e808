"""Models that are parallel in several ways: exact, and one region for all of their layers."""

import pytest

from tests.fxpasses.distributed.processes import job

KINDS = ("tp", "sp", "gathered", "read")


@pytest.fixture(scope="module")
def outcomes():
    return job("models.py", *KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_eager(outcomes, kind):
    assert max(max(rank[kind]["error"], rank[kind]["eager"]) for rank in outcomes) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_one_region(outcomes, kind):
    """Gathers of parameters stand outside; nine tenths of what a layer calls is inside."""
    for rank in outcomes:
        ((copies, calls),) = rank[kind]["regions"]
        assert copies == 4
        assert copies * calls >= 0.9 * rank[kind]["layer_calls"]
