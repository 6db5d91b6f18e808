"""Numbers of a model that change between calls: nothing is compiled again where Dynamo's guards say that its code does not depend on them."""

import copy

import pytest
import torch
from torch import nn

import fxpasses


class Notes(nn.Module):
    """Notes what it was given, as the blocks of a Swin Transformer do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.width, self.shift, self.epoch, self.scale, self.kind = None, 2, 0, 2.0, "sine"

    def forward(self, x):
        self.width = x.shape[1]
        if self.width <= 4:
            self.shift = 0
        y = self.inner(x) * self.scale + self.shift
        try:
            y = y / self.halves
        except AttributeError:
            y = y * (3 if "thirds" in self.inner[0].__dict__ else 1)
        return y.sin() if self.kind == "sine" else y.cos()


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FXPASSES_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    fxpasses.reset_stats()


def _step(compiled, model):
    """Whether a step of a compiled model, which is the first one, is as that of a copy in eager."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    eager, results = copy.deepcopy(model), []
    for call, owner in ((compiled, model), (eager, eager)):
        owner.zero_grad()
        y = call(x)
        y.sum().backward()
        results.append([y, *(p.grad for p in owner.parameters()), torch.tensor([owner.width, owner.shift])])
    return all(map(torch.allclose, *results))


def _compiled(model, how):
    return torch.compile(model, backend="fxpasses") if how == "torch" else fxpasses.compile(model)


@pytest.mark.parametrize("how", ["torch", "fxpasses"])
def test_what_a_model_notes_in_its_first_call_is_compiled_once(how):
    torch.manual_seed(0)
    model = Notes()
    made = copy.deepcopy(model)
    compiled = _compiled(model, how)
    assert all(_step(compiled, model) for _ in range(4))
    assert fxpasses.stats().graphs == 1
    assert fxpasses.stats().plans_written == 2

    torch._dynamo.reset()
    compiled = _compiled(made, how)
    assert all(_step(compiled, made) for _ in range(4))
    assert fxpasses.stats().graphs == 1


def test_a_number_that_nothing_reads_changes():
    torch.manual_seed(0)
    model = Notes()
    compiled = torch.compile(model, backend="fxpasses")
    for epoch in range(5):
        model.epoch = epoch
        assert _step(compiled, model)
    stats = fxpasses.stats()
    assert (stats.graphs, stats.plans_written, stats.plans_refused) == (1, 5, {})


CHANGES = {
    "a float": lambda model, patch: setattr(model, "scale", 3.0),
    "text": lambda model, patch: setattr(model, "kind", "cosine"),
    "an attribute that was not there": lambda model, patch: setattr(model, "halves", 2),
    "one of a part": lambda model, patch: setattr(model.inner[0], "thirds", True),
    "a flag": lambda model, patch: model.eval(),
    "a function": lambda model, patch: patch.setattr(torch.Tensor, "sin", torch.Tensor.tanh),
    "a method": lambda model, patch: patch.setattr(nn.ReLU, "forward", lambda self, x: x * 5),
    "a hook": lambda model, patch: model.inner[1].register_forward_hook(lambda module, given, out: out * 2),
    "a module": lambda model, patch: setattr(model, "inner", model.inner[:1]),
    "a kind of tensor": lambda model, patch: model.inner[0].weight.requires_grad_(False),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_together_with_a_number_is_noticed(change, monkeypatch):
    torch.manual_seed(0)
    model = Notes()
    compiled = torch.compile(model, backend="fxpasses")
    assert _step(compiled, model)
    assert _step(compiled, model)
    model.epoch = 7
    CHANGES[change](model, monkeypatch)
    assert _step_with_missing(compiled, model)
    assert _step_with_missing(compiled, model)


def _step_with_missing(compiled, model):
    for parameter in model.parameters():
        if not parameter.requires_grad:
            return torch.allclose(compiled(torch.ones(3, 4)), copy.deepcopy(model)(torch.ones(3, 4)))
    return _step(compiled, model)


def test_other_code_that_dynamo_has_is_not_taken_for_that_of_the_plan():
    torch.manual_seed(0)
    model = Notes()
    made = copy.deepcopy(model)
    compiled = fxpasses.compile(model)
    assert all(_step(compiled, model) for _ in range(3))
    model.kind = "cosine"
    assert _step(compiled.by_dynamo, model)  # compiled, and no plan is made of it
    assert _step(compiled, model)
    assert _step(compiled, model)

    torch._dynamo.reset()
    made.width, made.shift, made.kind = model.width, model.shift, "cosine"
    assert _step(fxpasses.compile(made), made)
