"""Stacks of equal layers, and ways to make one layer differ with little or no trace in its module tree."""

from __future__ import annotations

import copy
import types

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

LAYERS = 5


class Config:
    """What all layers of a model share, or each has of its own."""

    def __init__(self):
        self.gain, self.kind = 1.5, "tanh"


class Layer(nn.Module):
    """Reads Python state in most of the ways in which modules do."""

    FACTOR = 1.0

    def __init__(self, config=None):
        super().__init__()
        self.norm, self.linear, self.out = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.config, self.act = config or Config(), torch.tanh
        self.extra = {"shift": 0.25, "names": ["a", "b"]}
        self.register_buffer("table", torch.linspace(0.5, 1.5, 64).view(8, 8).clone())
        self.register_buffer("count", torch.zeros(()))

    @property
    def power(self):
        return 2.0

    def activate(self, x):
        return self.act(x) * self.config.gain

    def forward(self, x, number=1):
        y = self.activate(self.linear(self.norm(x)))
        y = torch.relu(y) if self.config.kind == "relu" else y
        y = y @ self.table + self.extra["shift"] * len(self.extra["names"])
        self.count.add_(1)
        return x + self.out(y) * number * self.FACTOR + 0.1 * y.abs().tanh() ** self.power


class Stack(nn.Module):
    """One layer after the other."""

    def __init__(self, layer=Layer):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class SharedConfig(Stack):
    def __init__(self):
        config = Config()
        super().__init__(lambda: Layer(config))


class InAWhileLoop(Stack):
    """Layers in a plain dictionary, which a while loop walks."""

    def __init__(self):
        super().__init__()
        self.table = dict(enumerate(self.layers))

    def forward(self, x):
        place = 0
        while place in self.table:
            x = self.table[place](x)
            place += 1
        return x


class Twice(Stack):
    def forward(self, x):
        for layer in self.layers:
            x = layer(layer(x))
        return x


class Numbered(Stack):
    """Gives each layer a number of its own."""

    def __init__(self):
        super().__init__()
        self.numbers = [1] * LAYERS

    def forward(self, x):
        for layer, number in zip(self.layers, self.numbers, strict=True):
            x = layer(x, number)
        return x


class Checkpointed(Stack):
    """Checkpoints some of the layers."""

    def __init__(self):
        super().__init__(Pure)
        self.checkpointed = set()

    def forward(self, x):
        for place, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if place in self.checkpointed else layer(x)
        return x


class Pure(Layer):
    """Writes nothing: what a checkpoint computes twice."""

    def forward(self, x):
        return x + self.out(self.activate(self.linear(self.norm(x))))


class Returning(Layer):
    odd = False

    def forward(self, x):
        y = super().forward(x)
        return {"x": y, "rest": (x, [y])} if self.odd else {"x": y, "rest": (y * 2, [x])}


class Returns(Stack):
    """Layers that return nested structures."""

    def __init__(self):
        super().__init__(Returning)

    def forward(self, x):
        total = 0
        for layer in self.layers:
            found = layer(x)
            x = 0.9 * found["x"] + 0.1 * found["rest"][1][0]
            total = total + found["rest"][0]
        return x + total


class Counting(Layer):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * (self.calls % 2))


class Keeping(Layer):
    last = None

    def forward(self, x):
        y = super().forward(x)
        y = y if self.last is None else y + self.last
        self.last = y.detach().mean(0, keepdim=True)
        return y


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))


class Images(Stack):
    def __init__(self):
        super().__init__(Convolution)

    def forward(self, x):
        return super().forward(x[:, :4, None, None] * torch.linspace(-1, 1, 16).view(4, 4))


class Scaled(Layer):
    def activate(self, x):
        return super().activate(x) * 0.5


class OfAClass(Layer):
    FACTOR = 0.5


class Cubed(Layer):
    @property
    def power(self):
        return 3.0


class Updating(Layer):
    def forward(self, x, number=1):
        y = super().forward(x, number)
        y[:, :2].mul_(2)
        return y


class Broken(Layer):
    @torch.compiler.disable
    def activate(self, x):
        return super().activate(x) * 2


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class WithFormula(Layer):
    def activate(self, x):
        return Tripled.apply(super().activate(x))


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).t()


def _class(kind):
    return lambda model, layer: setattr(layer, "__class__", kind)


def _shared_memory(model, layer):
    both = torch.linspace(0, 1, 68)
    layer.table, model.layers[0].table = both[:64].view(8, 8), both[4:].view(8, 8)


def _statistics(model, layer):
    layer.norm.track_running_stats, layer.norm.running_mean, layer.norm.running_var = False, None, None


def _frozen(weight):
    return nn.Parameter(weight, requires_grad=False)


def _double(module, args, output):
    return output * 2


CHANGES = {
    "an object's attribute": (Stack, lambda m, x: setattr(x.config, "gain", 0.75)),
    "an object's string": (Stack, lambda m, x: setattr(x.config, "kind", "relu")),
    "an object of its own": (SharedConfig, lambda m, x: setattr(x, "config", copy.copy(x.config)) or setattr(x.config, "gain", 0.1)),
    "a dictionary's value": (Stack, lambda m, x: x.extra.update(shift=-0.25)),
    "a list's length": (Stack, lambda m, x: x.extra["names"].append("c")),
    "a function": (Stack, lambda m, x: setattr(x, "act", torch.sigmoid)),
    "a method of one instance": (Stack, lambda m, x: setattr(x, "activate", torch.sin)),
    "forward of one instance": (Stack, lambda m, x: setattr(x, "forward", types.MethodType(lambda self, v: v + self.linear(v), x))),
    "a method of another class": (Stack, _class(Scaled)),
    "an attribute of another class": (Stack, _class(OfAClass)),
    "a property of another class": (Stack, _class(Cubed)),
    "a gradient formula": (Stack, _class(WithFormula)),
    "an update in place": (Stack, _class(Updating)),
    "a method that is not compiled": (Stack, _class(Broken)),
    "a hook that changes keywords": (Numbered, lambda m, x: x.register_forward_pre_hook(lambda _, a, k: ((a[0], 3), k), with_kwargs=True)),
    "a hook after it": (Stack, lambda m, x: x.register_forward_hook(_double)),
    "a hook on a weight": (Stack, lambda m, x: x.linear.weight.register_hook(lambda g: g * 3)),
    "a weight tied inside": (Stack, lambda m, x: setattr(x.out, "weight", x.linear.weight)),
    "a shared buffer": (Stack, lambda m, x: setattr(x, "table", m.layers[0].table)),
    "a shared counter": (Stack, lambda m, x: setattr(x, "count", m.layers[0].count)),
    "a counter's type": (Stack, lambda m, x: setattr(x, "count", x.count.long())),
    "buffers that overlap": (Stack, _shared_memory),
    "an expanded buffer": (Stack, lambda m, x: setattr(x, "table", torch.full((1,), 0.125).expand(8, 8))),
    "a weight that overlaps itself": (Stack, lambda m, x: setattr(x.out, "weight", _frozen(torch.linspace(0, 1, 20).as_strided((8, 8), (1, 1))))),
    "a buffer's strides": (Stack, lambda m, x: setattr(x, "table", x.table.t().contiguous().t())),
    "other data": (Stack, lambda m, x: setattr(x.linear.weight, "data", torch.linspace(-1, 1, 64).view(8, 8))),
    "data of another layer": (Stack, lambda m, x: setattr(x.linear.weight, "data", m.layers[0].linear.weight.data)),
    "weight_norm": (Stack, lambda m, x: parametrizations.weight_norm(x.linear)),
    "spectral_norm": (Stack, lambda m, x: parametrizations.spectral_norm(x.linear)),
    "a parametrization": (Stack, lambda m, x: parametrize.register_parametrization(x.out, "weight", Symmetric())),
    "memory format": (Images, lambda m, x: x.to(memory_format=torch.channels_last)),
    "no momentum": (Images, lambda m, x: setattr(x.norm, "momentum", None)),
    "no statistics": (Images, _statistics),
    "padding": (Images, lambda m, x: setattr(x, "conv", nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"))),
    "a checkpoint": (Checkpointed, lambda m, x: m.checkpointed.add(2)),
    "one in a while loop": (InAWhileLoop, lambda m, x: setattr(x.norm, "eps", 0.2)),
    "one that is called twice": (Twice, lambda m, x: setattr(x.config, "gain", 0.3)),
    "what it returns": (Returns, lambda m, x: setattr(x, "odd", True)),
    "a whole number given to it": (Numbered, lambda m, x: m.numbers.__setitem__(2, 2)),
    "its own count of calls": (lambda: Stack(Counting), lambda m, x: setattr(x, "calls", 7)),
    "a tensor that it keeps": (lambda: Stack(Keeping), lambda m, x: setattr(x, "last", None)),
    "it is another one's copy": (Stack, lambda m, x: m.layers.__setitem__(2, copy.deepcopy(m.layers[0]))),
    "it is another one": (Stack, lambda m, x: m.layers.__setitem__(2, m.layers[0])),
    "it is gone": (Stack, lambda m, x: m.layers.__delitem__(2)),
}  # fmt: skip
"""What to build, and what to do to the model and its layer 2."""
