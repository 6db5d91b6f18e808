"""Training steps with optimizers, compared with eager."""

import torch
from torch import nn


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


class Case:
    """A step of training. Its methods are called with what compiles functions."""

    make = staticmethod(lambda model: torch.optim.Adam(model.parameters(), lr=0.02, foreach=False))
    schedule = None

    def __init__(self, compiled):
        self.model = _model()
        self.optimizer = self.make(self.model)
        self.scheduler = self.schedule(self.optimizer) if self.schedule else None
        self.step = self.stepping(compiled)

    def stepping(self, compiled):
        def step():
            self.optimizer.step()

        step = compiled(step)

        def whole(x):
            self.model(x).square().sum().backward()
            step()
            self.optimizer.zero_grad()

        return whole


class Method(Case):
    def stepping(self, compiled):
        step = compiled(self.optimizer.step)

        def whole(x):
            self.model(x).square().sum().backward()
            step()
            self.optimizer.zero_grad()

        return whole


class Whole(Case):
    def stepping(self, compiled):
        model, optimizer = self.model, self.optimizer

        def whole(x):
            loss = model(x).square().sum()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return compiled(whole)


class Scheduled(Case):
    schedule = staticmethod(lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7))


class Momentum(Case):
    make = staticmethod(
        lambda model: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, foreach=False)
    )


class Groups(Case):
    make = staticmethod(
        lambda model: torch.optim.AdamW(
            [
                {"params": model[0].parameters(), "weight_decay": 0.1},
                {"params": [model[2].weight], "lr": torch.tensor(0.1)},
                {"params": [model[2].bias], "betas": (0.5, 0.9)},
            ],
            foreach=False,
        )
    )


class ByHand(Case):
    def stepping(self, compiled):
        parameters = [*self.model.parameters()]

        @torch.no_grad()
        def step(rate):
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.5).mul_(rate)

        step = compiled(step)

        def whole(x):
            self.model(x).square().mean().backward()
            step(torch.tensor(0.9))
            self.model.zero_grad()

        return whole


CASES = {
    "adam": Case, "method": Method, "whole": Whole, "scheduled": Scheduled, "momentum": Momentum, "groups": Groups, "by hand": ByHand,
}  # fmt: skip


def run(name, compiled, steps=5):
    """Whether a case does compiled what it does in eager."""
    contents = []
    for compiling in (compiled, lambda function: function):
        case = CASES[name](compiling)
        for i in range(steps):
            case.step(torch.ones(4, 6).mul(i + 1).sin())
            if case.scheduler is not None:
                case.scheduler.step()
        state = case.optimizer.state_dict()["state"].values()
        contents.append([*case.model.parameters(), *(v for one in state for v in one.values())])
    return len(contents[0]) == len(contents[1]) and all(
        torch.allclose(a, b, atol=1e-5, rtol=1e-4) for a, b in zip(*contents, strict=True)
    )
