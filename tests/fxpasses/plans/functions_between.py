"""Models whose calls run Python functions between their graphs. These functions have graphs of their own."""

import functools
import sys

import torch
from torch import nn

import fxpasses


def noted(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def loss(result, target, *rest, scale=2.0, **named):
    result = (result - target).square() * scale
    torch._dynamo.graph_break()
    return result.mean() + sum(rest) + named.get("more", 0.0)


@noted
def decorated(result, target, /, *, scale):
    result = (result - target).abs() * scale
    torch._dynamo.graph_break()
    return result.sum()


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        x = self.linear(x).sigmoid()
        torch._dynamo.graph_break()
        return self.norm(x)


class Inherits(Base):
    def forward(self, x):
        return super().forward(x.sin()) * 2


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Base()

    def forward(self, x, target):
        x = self.body(x + 1).cos()
        return loss(x, target, 1.0, scale=3.0, more=decorated(x, target, scale=0.5))


class Layers(nn.Module):
    """Dynamo leaves a loop in which a graph ends to Python, and compiles what the loop calls."""

    def __init__(self, number=3):
        super().__init__()
        self.layers = nn.ModuleList(Base() for _ in range(number))

    def forward(self, x, target):
        for layer in self.layers:
            x = x + layer(x)
        return loss(x, target)


def tripled(x):
    return x * 3


@torch.compiler.disable
def is_positive(x):
    return bool(x.sum() > 0)


def chooses(x):
    y = broken(x.abs())
    return y + tripled(x) if is_positive(x) else y


def broken(x):
    x = x.sin()
    torch._dynamo.graph_break()
    return x.cos()


def breaks_first(x):
    """Its frame ends where it calls, before it has a graph."""
    return broken(x) * 2 + 1


def makes_closures(x):
    for i in range(3):

        def inner(x):
            x = broken(x) + 1
            torch._dynamo.graph_break()
            return x if i < 5 else x * 2  # noqa: B023  (called before it changes)

        x = inner(x)
    return x


def shared_with_generator(x, times=2):
    parts = x.sin(), x
    torch._dynamo.graph_break()
    scaled = tuple(part * times + len(parts) for part in parts)
    torch._dynamo.graph_break()
    later = scaled[0] + 1
    return sum(part * later for part in scaled)


def shared_before(x, times=2):
    """A function that was made before the graph ended sees what the frame goes on to write, and the frame what it writes."""

    def double():
        nonlocal times
        times = times * 2
        return times

    x = x.sin()
    torch._dynamo.graph_break()
    times += 1
    x = x * double()
    return x * times + double()


def gives_away(x, times=2):
    """Functions that live on have variables of their own."""
    x = x.cos()
    torch._dynamo.graph_break()
    scales = [lambda value: value * times + value.numel()]
    times = float(x.numel())
    return x * times, scales[0]


class Cells(Base):
    """The class of ``super`` and a mask are shared with functions inside."""

    def forward(self, x, target):
        mask = target > 0
        torch._dynamo.graph_break()
        result = super().forward(x)
        return sum((part * mask).sum() for part in (result, x))


class Local(nn.Module):
    """A function that no name leads to."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

        def inner(x):
            x = self.linear(x)
            torch._dynamo.graph_break()
            return x.sin()

        self.inner = inner

    def forward(self, x, target):
        return (self.inner(x + 1) - target).sum()


MODELS = {kind.__name__: kind for kind in (WithLoss, Layers, Local, Cells)}


def step(model, call, x, target):
    """The result of a call, its gradients, and buffers afterwards."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.zero_grad()
    result = call(x, target)
    result.backward()
    found = [
        result.detach(),
        *(p.grad.clone() for p in model.parameters()),
        *(b.clone() for b in model.buffers()),
    ]
    model.load_state_dict(state)
    return found


def main(cache, *names):
    """What a process finds: for each model whether two steps agree with eager, and what was counted."""
    found = {}
    for name in names:
        torch.manual_seed(0)
        fxpasses.reset_stats()
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()  # Dynamo remembers across models which floats are dynamic
        model = MODELS[name]().double()
        compiled = fxpasses.compile(model, cache=cache)
        agree = []
        for _ in range(2):
            given = [torch.randn(3, 4, dtype=torch.float64) for _ in range(2)]
            pairs = zip(step(model, compiled, *given), step(model, model, *given), strict=True)
            agree.append(all(torch.allclose(a, b, atol=1e-5) for a, b in pairs))
        stats = fxpasses.stats()
        found[name] = [all(agree), stats.graphs, stats.plans_used, stats.plans_written, stats.plans_refused]
    return found


if __name__ == "__main__":
    import json

    print(json.dumps(main(*sys.argv[1:])))
