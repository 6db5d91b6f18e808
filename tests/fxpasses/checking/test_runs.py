"""Runs of a graph on made-up values: what a kernel cannot take raises."""

import pytest
import torch
import torch.nn.functional as F

from fxpasses import capture
from fxpasses.checking.comparison.values import Reference
from fxpasses.checking.execution.inputs import Unsupported
from fxpasses.checking.execution.interpret import ExactRun


def test_a_sampling_grid_that_is_not_finite_raises_where_the_kernel_crashes():
    torch.manual_seed(0)
    image, grid = torch.randn(1, 1, 4, 4), torch.zeros(1, 2, 2, 2, requires_grad=True)
    gm = capture(
        lambda image, grid: F.grid_sample(image, grid, padding_mode="border", align_corners=False),
        image,
        grid,
    ).joint
    inputs = [image, torch.full((1, 2, 2, 2), float("nan")), torch.ones(1, 1, 2, 2)]
    with pytest.raises(Unsupported, match="argument 2 of aten"):
        _ = Reference(gm, inputs).native
    assert ExactRun(gm).results(inputs) is None
