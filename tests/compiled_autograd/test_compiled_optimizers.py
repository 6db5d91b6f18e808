"""Whole training steps, optimizer included, inside of a compiled function: the same ten steps as eager."""

import pytest
import torch
from torch import nn

import compiled_autograd
from tests.compiled_autograd.support import assert_same, flat, mlp

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

STEPS = 10

OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "sgd_foreach": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01),
    "adam_fused": lambda groups: torch.optim.Adam(groups, lr=0.01, fused=True),
    "adamw_foreach": lambda groups: torch.optim.AdamW(groups, lr=0.01, foreach=True),
    "adamw_fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
}


def groups_of(model):
    """Two groups of other settings."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 0.05}]


def train(make_step, make_optimizer, compiled=None):
    """Losses and parameters of ten steps; ``make_step(model, optimizer)`` gives a function of a batch."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = make_optimizer(groups_of(model))
    step = make_step(model, optimizer)
    step = step if compiled is None else compiled(step)
    results = []
    for number in range(STEPS):
        torch.manual_seed(number)
        results.append(step(torch.randn(4, 4)).detach().clone())
    return results, [p.detach().clone() for p in model.parameters()]


def captured(step):
    compiled = torch.compile(step, backend="eager")

    def call(*arguments):
        with compiled_autograd.enable(flat):
            return compiled(*arguments)

    return call


def plain(model, optimizer):
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def clipped(model, optimizer):
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    return step


def scaled(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)

    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        return loss

    return step


def with_closure(model, optimizer):
    def step(x):
        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure)

    return step


def in_backward(model, optimizer):
    """Each parameter is updated as soon as its gradient is there."""

    def update(parameter):
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return step


CASES = [
    (plain, "sgd_foreach"),
    (plain, "adam"),
    (plain, "adamw_fused"),
    (clipped, "adamw_foreach"),
    (scaled, "adam_fused"),
    (with_closure, "sgd"),
    (in_backward, "sgd"),
]


@pytest.mark.parametrize(("make_step", "optimizer"), CASES)
def test_a_whole_step_is_the_same_as_in_eager(make_step, optimizer):
    expected = train(make_step, OPTIMIZERS[optimizer])
    assert_same(expected, train(make_step, OPTIMIZERS[optimizer], captured))
    stats = compiled_autograd.stats()
    assert stats.captures + stats.hits == STEPS
    assert not stats.fallbacks
    assert not stats.uncompiled_reasons
