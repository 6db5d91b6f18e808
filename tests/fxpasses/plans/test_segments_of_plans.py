"""Plans of programs that fall into parts: small regions that generated code calls by name, functions that go on after a graph break."""

import sys

import pytest
import torch
from torch import nn

import fxpasses


def step(model, call, x):
    model.zero_grad()
    result = call(x)
    result.square().sum().backward()
    return [result.detach(), *(p.grad.clone() for p in model.parameters())]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.gate = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)
        x = x * torch.sigmoid(x) + torch.tanh(x * self.gate)
        return x - x.mean(-1, keepdim=True)


class Between(nn.Module):
    """Repeated norms between calls that differ: too many parts to compile them one by one."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(Scaled() for _ in range(6))

    def forward(self, x):
        for call, norm in zip(
            (torch.sin, torch.cos, torch.tanh, torch.exp, torch.sigmoid, torch.relu), self.norms, strict=True
        ):
            x = norm(call(x))
        return x


@pytest.mark.slow
def test_regions_that_generated_code_calls_by_name(tmp_path):
    torch.manual_seed(0)
    model, x = Between(), torch.randn(3, 8)
    expected = step(model, model, x)
    for number in range(2):
        torch._dynamo.reset()
        fxpasses.reset_stats()
        found = step(model, fxpasses.compile(model, cache=tmp_path, regions="always"), x)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        stats = fxpasses.stats()
        assert (stats.graphs, stats.regions, stats.plans_used) == ((0, 0, 1) if number else (1, 1, 0))


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = self.linear(x).relu()
        torch._dynamo.graph_break()
        return x * 2


class TwoBroken(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Broken(), Broken()

    def forward(self, x):
        return self.second(self.first(x + 1).sin()).cos()


@pytest.mark.slow
def test_what_goes_on_in_a_function_that_was_inlined_has_plans(tmp_path):
    """With Dynamo's ``nested_graph_breaks`` the inner function goes on first and then its caller, traced together."""
    torch.manual_seed(0)
    model, x = TwoBroken(), torch.randn(2, 4)
    expected = step(model, model, x)
    for number in range(2):
        torch._dynamo.reset()
        fxpasses.reset_stats()
        with torch._dynamo.config.patch(nested_graph_breaks=True):
            compiled = fxpasses.compile(model, cache=tmp_path)
            for _ in range(2):
                torch.testing.assert_close(step(model, compiled, x), expected)
            stats = fxpasses.stats()
            assert (stats.graphs, stats.plans_written, stats.plans_refused) == (
                (0, 0, {}) if number else (3, 3, {})
            )
            model.second.forward = lambda x: model.second.linear(x) * 3
            changed = step(model, model, x)
            torch.testing.assert_close(step(model, compiled, x), changed)
            del model.second.forward
            torch.testing.assert_close(step(model, compiled, x), expected)


REFUSES, FACTOR = True, 2.0


def refused(x):
    if REFUSES:
        raise ValueError
    return x


def broken(x):
    x = x * FACTOR
    torch._dynamo.graph_break()
    return x + 1


class Catches(nn.Module):
    def forward(self, x):
        try:
            return refused(x) * 5
        except ValueError:
            return x * 3


class LeftByTheGraph(nn.Module):
    def forward(self, x):
        return broken(x) * 3


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "change"), [(Catches, "REFUSES"), (LeftByTheGraph, "FACTOR")])
def test_what_functions_read_that_dynamo_did_not_trace_to_their_end(tmp_path, monkeypatch, kind, change):
    """One that raises is part of the trace, too, and so is one in which the graph ends."""
    model, x = kind(), torch.ones(3)
    for number in range(3):
        torch._dynamo.reset()
        fxpasses.reset_stats()
        with torch._dynamo.config.patch(nested_graph_breaks=True):
            assert fxpasses.compile(model, cache=tmp_path)(x).equal(model(x)), number
        assert (fxpasses.stats().plans_written > 0) == (number != 1)
        if number == 1:
            monkeypatch.setitem(globals(), change, 0)


HERE = sys.modules[__name__]


def reads_a_dictionary(x):
    return x * HERE.__dict__.get("FACTOR", 5.0)


def test_what_is_read_in_the_dictionary_of_a_module_is_unknown(tmp_path):
    fxpasses.reset_stats()
    x = torch.ones(3)
    assert fxpasses.compile(reads_a_dictionary, cache=tmp_path)(x).equal(reads_a_dictionary(x))
    assert "code that may read any attribute of a module" in fxpasses.stats().plans_refused
