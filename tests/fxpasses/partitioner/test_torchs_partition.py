"""``options={"partition": "torch"}``: what is saved as torch's own partitioner decides it."""

import pytest
import torch
from torch import nn

import fxpasses
from fxpasses.backend import fxpasses as backend
from fxpasses.compiling import graph_compilers


def gradients(run, model, x):
    model.zero_grad()
    x.grad = None
    run(x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


@pytest.fixture
def asked(monkeypatch):
    found = []
    torchs = graph_compilers.min_cut_rematerialization_partition

    def watched(joint, *args, **kwargs):
        found.append(torch._functorch.config.activation_memory_budget)
        return torchs(joint, *args, **kwargs)

    monkeypatch.setattr(graph_compilers, "min_cut_rematerialization_partition", watched)
    return found


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("budget", [None, 0.5])
@pytest.mark.parametrize("regions", ["off", "always"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients_are_those_of_eager(asked, tmp_path, compiler, budget, regions, dynamic):
    if compiler == "inductor" and (dynamic or budget is None):
        pytest.skip("one program for each way with Inductor says it")
    torch._dynamo.reset()
    fxpasses.reset_stats()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.0)) for _ in range(3)]
    model, x = nn.Sequential(*layers), torch.randn(4, 8, requires_grad=True)
    options = {
        "partition": "torch", "memory_budget": budget, "compiler": compiler, "regions": regions, "cache": str(tmp_path)
    }  # fmt: skip
    with torch._functorch.config.patch(enable_autograd_cache=False):
        compiled = torch.compile(model, backend=backend, options=options, dynamic=dynamic)
        torch.testing.assert_close(gradients(compiled, model, x), gradients(model, model, x))
    assert asked
    assert set(asked) == {1.0 if budget is None else budget}
    assert not fxpasses.stats().fallbacks


def test_a_graph_is_not_taken_for_one_that_was_cut_otherwise():
    digests = {
        graph_compilers.cache_identity(fxpasses.Options(partition=whose)) for whose in ("torch", "fxpasses")
    }
    assert len(digests) == 2
