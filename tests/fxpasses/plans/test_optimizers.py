"""A compiled step of an optimizer, whose own functions Dynamo compiles one by one."""

import torch
from torch import nn


def trained(steps, make, compiled):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = make(model.parameters())

    def step():
        optimizer.step()

    step = torch.compile(step, backend="fxpasses") if compiled else step
    for _ in range(steps):
        model(torch.ones(4, 6)).square().sum().backward()
        step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_steps_of_optimizers(monkeypatch, tmp_path):
    """The first step is compiled, the second one finds the plan of it in this process: Dynamo asked what it lacked."""
    monkeypatch.setenv("FXPASSES_CACHE_DIR", str(tmp_path))
    for make in (torch.optim.Adam, lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)):
        for found, expected in zip(trained(4, make, True), trained(4, make, False), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
