"""accelerate(): AOTAutograd with symbolic sizes makes torch's graphs, node by node, and saves what torch saves."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import aot_function, aot_module, make_boxed_func

import fake
from tests.fake.support import structure


class Program(nn.Module):
    """A function of the inputs and of one layer."""

    def __init__(self, function, layer=None):
        super().__init__()
        self.function, self.layer = function, layer

    def forward(self, *inputs):
        return self.function(self.layer, *inputs)


PROGRAMS = {
    "linear, flat": (lambda: nn.Linear(4, 5), lambda layer, x: layer(x).view(-1), [(3, 4)]),
    "three times": (lambda: nn.Linear(4, 4), lambda layer, x: layer(layer(layer(x))).view(-1), [(3, 4)]),
    "sums": (None, lambda _, x: F.relu(x).sum(0), [(3, 4)]),
    "expand": (None, lambda _, x: (x[:, None].expand(x.shape[0], 7, x.shape[1]) * 2).sum(1), [(3, 4)]),
    "choice": (None, lambda _, x: torch.where(x > 0, x, -x).mean(1), [(3, 4)]),
    "differences": (None, lambda _, x: ((x[:, None] - x[None]) ** 2).sum(-1), [(3, 4)]),
    "joined": (None, lambda _, x, y: (torch.cat([x, y]).sin(), torch.cat([y, x]).view(-1)), [(3, 4), (5, 4)]),
    "stacked": (None, lambda _, x, y: torch.stack([x, y, x * y]).prod(0), [(3, 4), (3, 4)]),
    "einsum": (None, lambda _, x, y: torch.einsum("bij,bjk->bik", x, y).sum(-1), [(2, 3, 4), (2, 4, 5)]),
    "pooled": (lambda: nn.Conv2d(3, 4, 3), lambda layer, x: F.max_pool2d(layer(x), 2).flatten(1), [(2, 3, 6, 6)]),
    "reshaped": (None, lambda _, x: (x.view(x.shape[0], -1, 2) @ torch.ones(2, 3)).reshape(x.shape[0], -1), [(3, 4)]),
    "embedded": (lambda: nn.Embedding(10, 4), lambda layer, x: layer((x.abs() * 2).long()).sum(1), [(3, 4)]),
    "sorted": (None, lambda _, x: x.cumsum(0).sort(1)[0], [(3, 4)]),
}  # fmt: skip


def run(program, way, accelerated):
    """The graphs, how a backward pass that keeps the graph is refused, outputs and gradients of a program: AOTAutograd called on a module or a function, or behind Dynamo."""
    torch._dynamo.reset()
    graphs = []

    def compiler(graph, _):
        graphs.append(structure(graph))
        return make_boxed_func(graph.forward)

    make, function, sizes = PROGRAMS[program]
    torch.manual_seed(0)
    module = Program(function, make and make())
    inputs = [torch.randn(size).requires_grad_() for size in sizes]
    parameters = dict(module.named_parameters())

    def pure(*values):
        own = dict(zip(parameters, values[len(inputs) :], strict=True))
        return torch.func.functional_call(module, own, values[: len(inputs)])

    both = {"fw_compiler": compiler, "bw_compiler": compiler}
    with fake.accelerate() if accelerated else contextlib.nullcontext():
        if way == "module":
            outputs = aot_module(module, dynamic=True, **both)(*inputs)
        elif way == "function":
            outputs = aot_function(pure, dynamic=True, **both)(*inputs, *parameters.values())
        else:
            outputs = torch.compile(module, dynamic=True, backend=aot_autograd(**both))(*inputs)
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        loss = sum((output**2).sum() for output in outputs)
        leaves = [*inputs, *parameters.values()]
        refusal = ""
        try:
            torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
        except RuntimeError as refused:  # what is saved is a buffer of the graph's own
            refusal = str(refused)
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return graphs, refusal, [*outputs, *gradients]


@pytest.mark.parametrize("way", ["module", "function", "dynamo"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_same_graphs(program, way):
    expected, refusal, values = run(program, way, False)
    assert len(expected) == 2
    fake.accelerate.cache_clear()
    for _ in ("dispatched", "rebuilt"):
        graphs, our_refusal, found = run(program, way, True)
        assert graphs == expected
        assert our_refusal == refusal
        torch.testing.assert_close(found, values, rtol=0, atol=0)
