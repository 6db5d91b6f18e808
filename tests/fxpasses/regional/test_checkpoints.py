"""Repeated layers inside of checkpointed functions: found, compiled once, and made again in the backward pass."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fxpasses
from tests.fxpasses.regional.support import Block, check, compiled, copies, reasons, saved_bytes, step

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)


class Segments(nn.Module):
    """Checkpointed functions of several layers each."""

    def __init__(self, *layers: int, p: float = 0.0, around=None, **how):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8)
        self.segments = nn.ModuleList(nn.Sequential(*(Block(p=p) for _ in range(n))) for n in layers)
        self.around, self.how = around, how

    def forward(self, x):
        x = self.first(x)
        for segment in self.segments:
            if self.around is None:
                x = checkpoint(segment, x, use_reentrant=False, **self.how)
            else:
                with self.around():
                    x = checkpoint(segment, x, use_reentrant=False, **self.how)
        return x.float().tanh()


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_layers_inside_of_checkpoints(dynamic):
    assert check(Segments(6), [X], dynamic=dynamic) == [6]
    assert check(Segments(3, 4), [X], dynamic=dynamic) == [4, 3]


@pytest.mark.slow
def test_checkpoints_that_repeat_are_regions_with_regions_inside():
    assert check(Segments(3, 3, 3), [X]) == [3]
    assert check(Segments(1, 1, 1, 1), [X], dynamic=True) == [4]
    assert check(Segments(1, 1, 1, 1), [X]) == [4]


def test_what_is_inside_is_not_saved():
    kept = {regions: saved_bytes(Segments(6), [X], regions) for regions in ("off", "always")}
    assert copies() == [6]
    assert 0 < kept["always"] <= kept["off"]


@pytest.mark.slow
def test_random_numbers_are_drawn_by_the_graph_around():
    results = {}
    for regions in ("off", "always"):
        torch._dynamo.reset()
        fxpasses.reset_stats()
        model = Segments(3, 4, p=0.5)
        call = compiled(model, regions)
        torch.manual_seed(1)
        results[regions] = step(call, model, [X])
    torch.testing.assert_close(results["always"], results["off"])
    assert copies() == []
    assert "has to sample the same random numbers again" in reasons()


def test_policies_see_all_operators():
    policy = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    check(Segments(3, 4, context_fn=policy), [X])
    assert copies() == []
    assert "decides for each operator" in reasons()


def test_modes_around_a_checkpoint_hold_inside():
    autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    check(Segments(3, 4, around=autocast), [X], tolerance=5e-2)
    assert copies() == []
    assert "is set around its checkpoint" in reasons()
