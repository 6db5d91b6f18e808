"""Layers, stacks of them, and a comparison with eager, for tests of replay."""

import copy

import torch
from torch import nn

LAYERS = 6
# The first layer gets an input of the graph, unlike the others. The second and third are compared.
COPIED = LAYERS - 3


class Layer(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.drop = nn.Dropout(0.0)
        self.scale = 1.5
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        y = self.drop(torch.relu(self.linear(self.norm(x)))) * self.scale
        return x + y if self.scale > 1 else x - y


class Stack(nn.Module):
    def __init__(self, layer=Layer, layers=LAYERS):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def compiled(model, dynamic=False, **options):
    settings = {"compiler": "eager", "regions": "off", **options}
    return torch.compile(model, backend="fxpasses", dynamic=dynamic, options=settings)


def agree(model, call, *inputs):
    """Outputs, gradients and buffers of a compiled model are those of eager."""
    eager = copy.deepcopy(model)
    for each, run in ((eager, eager), (model, call)):
        each.zero_grad()
        x = [i.clone().requires_grad_(i.is_floating_point()) for i in inputs]
        out = run(*x)
        out.float().square().sum().backward()
        results = [out, *(i.grad for i in x), *(p.grad for p in each.parameters()), *each.buffers()]
        if each is eager:
            expected = results
    for a, b in zip(expected, results, strict=True):
        if a is None or b is None:
            assert a is b
        else:
            torch.testing.assert_close(a, b)
