"""What a CUDA graph asks of the stitched code, shown without a GPU: no waiting for the device, nothing that is not in memory."""

import copy

import pytest
import torch
from torch import nn

import fxpasses
from fxpasses.compiling.graph_compilers import EagerCompiler
from tests.fxpasses.regional.recorded import Recording
from tests.fxpasses.regional.support import Block, Stack, compiled, copies

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Normed(nn.Module):
    """A layer that updates buffers: running statistics, a counter, a moving average."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x):
        with torch.no_grad():
            self.average.lerp_(x.mean(0), 0.1)
        return x + self.linear(self.norm(x)).tanh() + self.average


class Shared(Stack):
    """The layers share a weight and read views of one tensor."""

    def __init__(self):
        super().__init__([Block() for _ in range(4)])
        self.scales = nn.Parameter(torch.randn(4, 8))
        for layer in self.layers[1:]:
            layer.up.weight = self.layers[0].up.weight

    def forward(self, x):
        x = self.first(x)
        for layer, scale in zip(self.layers, self.scales.unbind(0), strict=True):
            x = layer(x * scale)
        return self.last(x)


MODELS = {
    "blocks": lambda: Stack([Block() for _ in range(4)]),
    "buffers": lambda: Stack([Normed() for _ in range(4)]),
    "shared": Shared,
    "frozen": lambda: Stack([Block().requires_grad_(i > 1) for i in range(5)]),
}


def gradients(call, x, weights, wanted):
    output = call(x)
    return [output.detach(), *torch.autograd.grad((output * wanted).sum(), weights)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_is_done_again_by_its_memory_alone(name, dynamic):
    model = MODELS[name]()
    wanted_model = copy.deepcopy(model)
    call = compiled(model, dynamic=dynamic, mode="reduce-overhead")
    x, cotangent = torch.randn(4, 8), torch.randn(4, 3)
    weights = [p for p in model.parameters() if p.requires_grad]
    wanted_weights = [p for p in wanted_model.parameters() if p.requires_grad]
    for _ in range(2):  # as before any capture: what is allocated once is
        gradients(call, x, weights, cotangent)
        gradients(wanted_model, x, wanted_weights, cotangent)
    recording = Recording()
    with recording:
        got = gradients(call, x, weights, cotangent)
    torch.testing.assert_close(got, gradients(wanted_model, x, wanted_weights, cotangent))
    assert recording.waits == []
    assert recording.regions == 2 * sum(copies()) > 0
    for _ in range(2):
        with torch.no_grad():
            x.copy_(torch.randn(4, 8))
            cotangent.copy_(torch.randn(4, 3))
            for weight, same in zip(weights, wanted_weights, strict=True):
                same.copy_(weight.mul_(0.9))
        recording.replay()
        wanted = gradients(wanted_model, x, wanted_weights, cotangent)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(dict(model.named_buffers()), dict(wanted_model.named_buffers()))


def test_the_recording_sees_what_does_not_belong_into_a_cuda_graph():
    """The test of the test: a number read from a tensor waits, and its replay is wrong."""
    x = torch.ones(3)
    recording = Recording()
    with recording:
        y = x * x.sum().item()
    assert recording.waits == ["aten._local_scalar_dense.default"]
    x.fill_(2.0)
    recording.replay()
    torch.testing.assert_close(y, torch.full((3,), 6.0))  # and not 12


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked", [{"mode": "reduce-overhead"}, {"inductor": {"triton.cudagraphs": True}}, {}]
)
def test_floats_of_modules_are_no_inputs_where_cuda_graphs_are_asked_for(asked, monkeypatch):
    """With dynamic shapes they would be tensors on the CPU: Inductor records no CUDA graph around such."""
    scalars = []
    forward = EagerCompiler.forward

    def spy(self, gm, inputs, **how):
        scalars.extend(i for i in inputs if isinstance(i, torch.Tensor) and i.dtype is torch.float64)
        return forward(self, gm, inputs, **how)

    monkeypatch.setattr(EagerCompiler, "forward", spy)
    model = Stack([Block(scale=0.5) for _ in range(4)])
    call = compiled(model, dynamic=True, **asked)
    for rows in (3, 4, 5):
        model.layers[1].scale = 0.7 if rows == 5 else 0.5
        x = torch.randn(rows, 8)
        torch.testing.assert_close(call(x), model(x))
    assert bool(scalars) is not bool(asked)
    assert fxpasses.stats().graphs == (2 if asked else 1)
    assert copies()[0] == 4
