"""One layer is changed between two steps of training: neither its region nor its copied trace may be that of the others."""

import copy

import pytest
import torch

import fxpasses
from tests.fxpasses.regional.changing import CHANGES
from tests.fxpasses.regional.support import compiled


@pytest.fixture(autouse=True, scope="module")
def one_cache():
    """What one test has compiled, the next one runs: another model of the same layers, until one of them is changed."""
    torch.set_default_dtype(torch.float64)  # rounding is not the question here
    torch._dynamo.reset()
    fxpasses.reset_stats()
    with torch._dynamo.config.patch(
        skip_nnmodule_hook_guards=False,  # torch does not look for new hooks by default
        recompile_limit=2 * len(CHANGES),
    ):
        yield
    torch.set_default_dtype(torch.float32)
    torch._dynamo.reset()


def trained(model, call, x):
    """One step of gradient descent: all that it gives and changes."""
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = call(x)
    y.tanh().square().mean().backward()
    found = {"output": y.detach(), "input": x.grad, **{n: b.clone() for n, b in model.named_buffers()}}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.grad is not None:
                found[name] = p.grad
                p -= 0.05 * p.grad
    return found


# Each once: what is compared is the same with static and dynamic sizes, and both see every sort of change.
@pytest.mark.slow
@pytest.mark.parametrize(("change", "dynamic"), [(c, i % 2 == 1) for i, c in enumerate(CHANGES)])
def test_a_layer_that_changes(change, dynamic):
    build, plant = CHANGES[change]
    torch.manual_seed(0)
    model = build()
    eager = copy.deepcopy(model)
    breaks = change in ("a method that is not compiled", "no momentum")
    before = fxpasses.stats()
    call = compiled(model, fullgraph=not breaks, dynamic=dynamic)
    for step in range(4):
        if step == 2:
            for each in (model, eager):
                torch.manual_seed(1)
                plant(each, each.layers[2])
        x = torch.randn(4, 8)
        torch.testing.assert_close(trained(model, call, x), trained(eager, eager, x), rtol=1e-8, atol=1e-8)
    after = fxpasses.stats()
    assert after.region_reports
    # Only the last hundred reports are kept: their number alone does not tell of a new one.
    assert (
        after.graphs == before.graphs or after.region_reports[-1] is not (before.region_reports or [None])[-1]
    )
