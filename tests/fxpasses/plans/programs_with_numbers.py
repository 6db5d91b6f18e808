"""Functions with numbers as arguments: those of an earlier process, and those of a later one."""

import enum

import torch
from torch import nn

weight = torch.linspace(-1, 1, 64).reshape(8, 8)


class Level(enum.IntEnum):
    LOW = 3


def start(x, position):
    return x @ weight + torch.arange(position, position + x.shape[0])[:, None]


def temperature(x, t):
    return torch.softmax(x @ weight / t, -1)


def step(x, lr=0.1, *, scale=2):
    return x - lr * x.sin() * scale


def branch(x, n):
    return x * n if n > 3 else x + n


def count(x, n):
    for _ in range(n):
        x = (x @ weight).tanh()
    return x


def write(x, position, cache):
    cache[position : position + x.shape[0]] = x @ weight
    return cache[: position + x.shape[0]].sum(0)


def two(x, a, b):
    return x[:a] * b + x[a:].sum()


def size(x, n):
    return x.reshape(n, -1).sum(-1)


def inside(x, options):
    return x * options["scale"] + options["shifts"][0]


def rest(x, *numbers, **named):
    return x * numbers[0] + named["more"]


def returns(x, n):
    return x + n, n + 1, x.shape[0] * n


def breaks(x, n):
    y = x * n
    torch._dynamo.graph_break()
    return y + n


def learns(x, scale):
    return (x.requires_grad_() * scale).exp().mean() * scale


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x, t, n=1):
        return (x @ self.weight) * t + n


def x(rows=4):
    return torch.linspace(-1, 1, rows * 8).reshape(rows, 8)


def with_cache(position):
    return x(2), position, torch.zeros(16, 8)


def given(*numbers, **named):
    return [((x(), number), named) for number in numbers]


CASES = {
    "start": (start, given(0, 2, 5, 3), given(0, 7, 1, 4, -2, 2**40, 12)),
    "temperature": (temperature, given(1.0, 0.7, 0.5), given(0.9, 1.0, 0.7, -2.0, float("inf"), 3, 2, 1e-30)),
    "zero": (step, given(0.1, 0.2, 0.3), given(0.0, -0.0, float("nan"), 0.2, 1, True)),
    "defaults": (step, [*given(0.1, 0.2, 0.3, scale=3), ((x(),), {})], [*given(0.4, scale=3), *given(0.5, scale=4), ((x(),), {}), ((x(),), {"scale": 5, "lr": 0.3}), ((x(),), {"lr": 0.3, "scale": 6})]),
    "branch": (branch, given(1, 5, 6, 2), given(7, 3, 4, 0, -1, 1, Level.LOW)),
    "count": (count, given(1, 2, 3), given(2, 4, 1)),
    "write": (write, [(with_cache(p), {}) for p in (0, 2, 4)], [(with_cache(p), {}) for p in (3, 0, 9, 14)]),
    "two": (two, [((x(), a, b), {}) for a, b in ((1, 2), (2, 3), (3, 2))], [((x(), a, b), {}) for a, b in ((2, 2), (3, 3), (1, 7), (4, 4), (0, 1))]),
    "a size": (size, [((x(r), n), {}) for r, n in ((4, 4), (6, 3), (8, 8))], [((x(r), n), {}) for r, n in ((6, 6), (6, 2), (10, 5), (4, 1))]),
    "inside": (inside, [((x(), {"scale": s, "shifts": [1]}), {}) for s in (2, 3, 4)], [((x(), {"scale": s, "shifts": [t]}), {}) for s, t in ((3, 1), (5, 1), (3, 2))]),
    "rest": (rest, given(2, 3, 4, more=1), given(3, 5, more=2)),
    "returns": (returns, given(2, 3, 4), given(3, 5, 6)),
    "breaks": (breaks, given(2, 3, 4), given(3, 5, 6)),
    "learns": (learns, given(0.2, 0.3, 0.4), given(0.3, 0.5, 0.2)),
    "learns integers": (learns, given(2, 3, 1), given(3, 4, 2)),
    "module": (Module, given(0.1, 0.2, 0.3), [*given(0.2, 0.4), *given(0.4, n=2)]),
    "dynamic": (start, [((x(r), p), {}) for r, p in ((4, 0), (5, 3), (6, 2))], [((x(r), p), {}) for r, p in ((7, 4), (7, 7), (3, 3), (1, 0))]),
}  # fmt: skip


def run(name, wrap, later):
    """Results and gradients of each call, in eager and by what ``wrap`` makes of the function."""
    function, first, second = CASES[name]
    function = function() if isinstance(function, type) else function
    called = wrap(function)
    for args, named in second if later else first:
        results = []
        for call in (function, called):
            given_now = [value.clone() if isinstance(value, torch.Tensor) else value for value in args]
            found = call(*given_now, **named)
            result = list(found) if isinstance(found, tuple) else [found]
            if isinstance(found, torch.Tensor) and found.requires_grad:
                found.sum().backward()
                result += [t.grad for t in given_now if isinstance(t, torch.Tensor)]
            results.append([*result, *(value for value in given_now if isinstance(value, torch.Tensor))])
        yield results


def differ(results):
    """Which calls differ."""
    return [
        i
        for i, (wanted, found) in enumerate(results)
        if not all(
            torch.allclose(a, b, atol=1e-5, equal_nan=True) and a.dtype == b.dtype
            if isinstance(a, torch.Tensor)
            else a == b and type(a) is type(b)
            for a, b in zip(wanted, found, strict=True)
            if a is not None
        )
    ]
