"""Plans of frozen programs: they cannot be written, and are for the process that made them."""

import torch

import fxpasses
from fxpasses.tuning import tuned_graph
from fxpasses.tuning.choice import Choice
from fxpasses.tuning.freezing import FREEZING
from fxpasses.tuning.search import SearchResult

FROZEN = Choice((FREEZING,))


def tuned(model, x, cache, monkeypatch):
    torch._dynamo.reset()  # it would take sizes for symbolic that differ from those of another test's model: what is frozen is for fixed ones
    options = {"compiler": "eager", "cache": str(cache)}
    monkeypatch.setattr(tuned_graph, "search", lambda bench, *_: SearchResult(FROZEN, bench.compiled(FROZEN)))
    return fxpasses.tune(model, x, seconds=0, options=options, cache=cache, show=False)


@torch.no_grad()
def test_a_frozen_program_is_called_through_a_plan_that_sees_every_change(tmp_path, monkeypatch):
    layers = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Conv2d(4, 4, 3)
    model, x = torch.nn.Sequential(*layers).eval(), torch.randn(2, 3, 8, 8)
    program = tuned(model, x, tmp_path, monkeypatch)
    assert program.steps == ("freezing",)
    program(x)
    fxpasses.reset_stats()
    assert program(x).equal(model(x))
    assert fxpasses.stats().plans_used == 1
    changes = {
        "data": lambda: layers[0].weight.data.mul_(2),
        "memory": lambda: layers[1].running_mean.numpy().fill(3),
        "parameter": lambda: setattr(layers[2], "weight", torch.nn.Parameter(torch.randn(4, 4, 3, 3))),
        "sizes": lambda: setattr(layers[2].weight, "data", torch.randn(4, 4, 5, 5)),
        "module": lambda: model.append(torch.nn.Tanh()),
    }
    for what, change in changes.items():
        change()
        for _ in range(2):
            assert torch.allclose(program(x), model(x), atol=1e-5), what


@torch.no_grad()
def test_a_hook_that_comes_later_runs(tmp_path, monkeypatch):
    model, x = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 8, 8)
    program = tuned(model, x, tmp_path, monkeypatch)
    program(x)
    model[0].register_forward_hook(lambda module, args, output: output + 1)
    assert program(x).equal(model(x))


class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return self.conv(x) * self.calls


@torch.no_grad()
def test_one_that_changes_tensors_has_none(tmp_path, monkeypatch):
    model, x = Counts(), torch.randn(2, 3, 8, 8)
    program = tuned(model, x, tmp_path, monkeypatch)
    fxpasses.reset_stats()
    for calls in range(1, 4):
        assert torch.allclose(program(x), model.conv(x) * calls)
        assert model.calls == calls
    assert fxpasses.stats().plans_used == 0
    assert "changed tensors, and a program that cannot be written" in fxpasses.stats().plans_refused
