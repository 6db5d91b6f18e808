"""Floats of modules under dynamic shapes: tensors where arithmetic takes them, numbers with a guard elsewhere."""

import copy
import math

import pytest
import torch
from torch import nn

import fxpasses
from tests.fxpasses.regional.support import check, compiled, copies, step


class Normed(nn.Module):
    """A layer that computes with two floats of its own."""

    def __init__(self, compute, scale):
        super().__init__()
        self.linear, self.eps, self.scale, self.compute = nn.Linear(8, 8), 1e-6, scale, compute

    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x + self.linear(self.compute(y, self.scale).float())


COMPUTATIONS = {
    "of both operands": lambda y, s: s - y + 1.0 / (s + y.abs() + 1),
    "of the float itself": lambda y, s: y * (s * 2 + 1) / s,
    "with a scalar tensor": lambda y, s: y + y.mean() * s,
    "with whole numbers": lambda y, s: y + torch.arange(8) * s,
    "a root": lambda y, s: y * math.sqrt(2.0 / s) + math.sqrt(s),
    "in place": lambda y, s: y.clone().mul_(s).add_(s),
    "in low precision": lambda y, s: y.bfloat16() * s + y.bfloat16().mean() * s,
    "a power": lambda y, s: y.abs() ** s,
    "a factor of an operator": lambda y, s: torch.add(y, y.abs(), alpha=s),
    "a choice": lambda y, s: y * s if s > 0.8 else y - s,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMPUTATIONS)
def test_layers_that_differ_in_a_float_are_one_region_and_floats_may_change(kind):
    torch.manual_seed(0)
    torch._dynamo.reset()
    fxpasses.reset_stats()
    model = nn.Sequential(*(Normed(COMPUTATIONS[kind], 0.5 + 0.1 * i) for i in range(5)))
    wanted = copy.deepcopy(model)
    call = compiled(model, dynamic=True)
    tolerance = 3e-2 if kind == "in low precision" else 1e-4
    for scale in (0.6, 0.9, 0.3):
        model[1].scale = wanted[1].scale = scale
        x = torch.randn(4, 8, requires_grad=True)
        torch.testing.assert_close(
            step(call, model, [x]), step(wanted, wanted, [x]), rtol=tolerance, atol=tolerance
        )
    if kind not in ("a power", "a factor of an operator", "a choice"):
        assert (copies(), fxpasses.stats().graphs) == ([5], 1)


def test_a_float_that_the_first_layer_computes_for_all():
    """The activation of GPT-2: Dynamo computes ``sqrt(2 / pi)`` once, and ``math.pi`` is a float that may change."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    fxpasses.reset_stats()

    def gelu(y, _):
        return 0.5 * y * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (y + 0.044715 * torch.pow(y, 3.0))))

    model = nn.Sequential(*(Normed(gelu, 1.0) for _ in range(5)))
    call, wanted = compiled(model, dynamic=True), copy.deepcopy(model)
    for rows in (4, 6):
        x = torch.randn(rows, 8, requires_grad=True)
        torch.testing.assert_close(step(call, model, [x]), step(wanted, wanted, [x]), rtol=1e-5, atol=1e-5)
    assert (copies(), fxpasses.stats().graphs) == ([5], 1)


def test_floats_in_checkpoints():
    torch.manual_seed(0)
    torch._dynamo.reset()
    fxpasses.reset_stats()
    layers = nn.ModuleList(Normed(COMPUTATIONS["of the float itself"], 0.5 + 0.1 * i) for i in range(4))

    def run(x):
        for layer in layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return x

    call = compiled(run, dynamic=True)
    x = torch.randn(4, 8, requires_grad=True)
    torch.testing.assert_close(step(call, layers, [x]), step(run, layers, [x]))
    assert copies() == [3]  # Dynamo gives the first its arguments in another order


def test_floats_of_modules_are_numbers_after_one_trace_and_guarded():
    """What AOTAutograd cannot keep dynamic is specialized at once: Dynamo traces each version of the model once."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.slope = nn.LayerNorm(8, eps=1e-4), 0.3

        def forward(self, x):
            return x + nn.functional.leaky_relu(self.norm(x), self.slope)

    model = nn.Sequential(*(Layer() for _ in range(3)))
    wanted = copy.deepcopy(model)
    torch._dynamo.reset()
    fxpasses.reset_stats()
    call = compiled(model, dynamic=True)
    before = len(torch._dynamo.utils.compilation_time_metrics.get("bytecode_tracing", []))
    for slope in (0.3, 0.3, 0.9):
        model[1].slope = wanted[1].slope = slope
        x = torch.randn(5, 8)
        torch.testing.assert_close(call(x), wanted(x))
    traces = len(torch._dynamo.utils.compilation_time_metrics["bytecode_tracing"]) - before
    assert (fxpasses.stats().graphs, traces) == (2, 2)


class CountsCalls(torch.nn.Module):
    """Writes to an input of no dimensions, of which torch keeps the number."""

    def __init__(self, dtype):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=dtype))

    def forward(self, x):
        self.calls.add_(1)
        return x * self.calls


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64])
@pytest.mark.parametrize("gradients", [False, True])
def test_writes_to_inputs_without_dimensions_are_kept(gradients, dtype, dynamic):
    torch._dynamo.reset()
    model, x = CountsCalls(dtype), torch.ones(2, requires_grad=gradients)
    call = torch.compile(model, backend="fxpasses", dynamic=dynamic, options={"compiler": "eager"})
    for expected in (1.0, 2.0, 3.0):
        torch.testing.assert_close(call(x).detach(), torch.full((2,), expected))
    assert model.calls == 3


def test_writes_to_inputs_without_dimensions_are_kept_when_something_else_changes():
    """What is settled about one graph's floats is not read for the next one, whose symbols have the same names."""
    torch._dynamo.reset()
    model, factor = CountsCalls(torch.float64), [2.0]
    call = torch.compile(lambda x: model(x) * factor[0], backend="fxpasses", options={"compiler": "eager"})
    for count, factor[0] in enumerate((2.0, 3.0, 3.0, 4.0), 1):
        torch.testing.assert_close(call(torch.ones(2)), torch.full((2,), count * factor[0]))
    assert model.calls == 4


OF_SIZES = {
    "a root": lambda x, y: y / math.sqrt(x.shape[1]),
    "with a float of the module": lambda x, y: y * (0.7 / math.sqrt(x.shape[1])),
    "a power": lambda x, y: y * x.shape[1] ** -0.5,
    "the size as a float": lambda x, y: y * (float(x.shape[1]) * 0.1),
    "filled": lambda x, y: y + torch.full((x.shape[1], 1), 1 / x.shape[1]),
    "of an operator": lambda x, y: torch.addcmul(y, x, x, value=1 / x.shape[1]),
}


@pytest.mark.parametrize("kind", OF_SIZES)
def test_floats_of_sizes_stay_symbolic(kind):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return x + OF_SIZES[kind](x, self.linear(x).sin())

    torch.manual_seed(0)
    inputs = [torch.randn(3, rows, 8, requires_grad=True) for rows in (5, 6, 9)]
    assert check(
        nn.Sequential(*(Scaled() for _ in range(4))), inputs[:1], more=[[x] for x in inputs[1:]], dynamic=True
    ) == [4]
    assert fxpasses.stats().graphs == 1


READERS = {
    "an output": lambda x, s: (x * s, s * 2),
    "a value in a list": lambda x, s: (x * s, [x, {"key": s - 1}]),
    "an operator": lambda x, s: (x * s, torch.full((2,), s * 2)),
    "an operator of a root": lambda x, s: (x * s, torch.full((2,), math.sqrt(s))),
    "a factor": lambda x, s: (x * s, torch.add(x, x, alpha=s)),
    "a number with a factor": lambda x, s: (torch.add(x, s, alpha=2), x.sub(s, alpha=3)),
    "a sum of floats": lambda x, s: (torch.add(x, x, alpha=s) * (s * 2), s * 2 + s * 3),
    "in place, with a factor": lambda x, s: (x.clone().add_(s, alpha=2),),
}


THROUGH_INDUCTOR = ("an output", "an operator of a root", "a factor", "a sum of floats")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "compiler"), [*((k, "eager") for k in READERS), *((k, "inductor") for k in THROUGH_INDUCTOR)]
)
def test_each_call_gets_its_own_float(kind, compiler, tmp_path, monkeypatch):
    """Also where tensor arithmetic takes the same float, and graphs come from AOTAutograd's cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    call = torch.compile(READERS[kind], backend="fxpasses", options={"cache": "off", "compiler": compiler})
    x = torch.randn(2)
    for number in (0.5, 1.5, 2.5, 3.5):
        torch.testing.assert_close(call(x, number), READERS[kind](x, number))


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_constant_that_is_computed_of_no_number(number):
    """A product with NaN is NaN for each size: a constant, which does not equal itself."""
    torch._dynamo.reset()
    call = compiled(lambda x, rate: x - x.shape[0] * rate, dynamic=True)
    for rate in (1.0, 2.0, number):
        x = torch.ones(3)
        torch.testing.assert_close(call(x, rate), x - 3 * rate, equal_nan=True)
