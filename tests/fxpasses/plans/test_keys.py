"""What is part of a plan's key: settings that ``torch.compile`` makes itself, floats, hooks."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import fxpasses
from fxpasses.plans.walks.walk import Walk


@pytest.mark.slow
@pytest.mark.parametrize(("dynamic", "plans"), [(True, 1), (False, 2)])
def test_what_dynamic_sets_while_it_compiles_is_no_other_setting(tmp_path, dynamic, plans):
    """It is part of the key; Dynamo's settings are as before when a plan is looked for. ``eps`` is an input of the graph then."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).requires_grad_(False)
    for number in range(2):
        torch._dynamo.reset()
        fxpasses.reset_stats()
        compiled = fxpasses.compile(model, cache=tmp_path, dynamic=dynamic)
        for size in (2, 3):
            given = torch.ones(size, 4)
            assert torch.allclose(compiled(given), model(given), atol=1e-6)
        stats = fxpasses.stats()
        assert (stats.plans_written, stats.plans_refused) == (0 if number else plans, {})
    assert (stats.plans_used, stats.graphs) == (plans, 0)


@pytest.mark.parametrize(("dynamic", "plans"), [(True, 1), (None, 2)])
def test_several_symbolic_sizes(tmp_path, dynamic, plans):
    model = nn.Linear(4, 4).requires_grad_(False)
    for number in range(2):
        torch._dynamo.reset()
        fxpasses.reset_stats()
        compiled = fxpasses.compile(model, cache=tmp_path, dynamic=dynamic)
        for batch, length in ((2, 3), (4, 5), (6, 7)):
            given = torch.ones(batch, length, 4)
            assert torch.allclose(compiled(given), model(given), atol=1e-6)
        stats = fxpasses.stats()
        assert (stats.plans_written, stats.plans_refused) == (0 if number else plans, {})
    assert (stats.plans_used, stats.graphs) == (plans, 0)


@pytest.mark.slow
def test_a_float_that_is_an_input_of_the_graph_is_what_it_is_in_the_call(tmp_path):
    model = _Scaled()
    for number in range(2):
        for attribute, argument in ((0.5, 1.5), (0.5, 2.5), (0.25, 1.5), (float("inf"), 0.1)):
            torch._dynamo.reset()
            fxpasses.reset_stats()
            compiled = fxpasses.compile(model, cache=tmp_path, dynamic=True)
            model.scale = attribute
            assert torch.equal(compiled(torch.ones(3, 4), argument), model(torch.ones(3, 4), argument))
            stats = fxpasses.stats()
            # The argument is an input, and the attribute a constant.
            is_used = number == 1 or argument == 2.5
            assert (stats.plans_used, stats.plans_written, stats.plans_refused) == (is_used, not is_used, {})


class _Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 0.5

    def forward(self, x, factor):
        return (x * factor).sin() * self.scale


def test_the_numbers_of_hooks_are_those_of_a_process():
    """A plan knows their order."""

    def digest(hooks):
        module = nn.Linear(2, 2)
        for hook in hooks:
            module.register_forward_hook(hook, with_kwargs=hook is _doubled_with_kwargs)
        return Walk().add("model", module)

    before = digest([_doubled, _doubled_with_kwargs])
    assert digest([_doubled, _doubled_with_kwargs]) == before
    assert digest([_doubled_with_kwargs, _doubled]) != before
    assert digest([_doubled]) != before


@pytest.mark.slow
def test_the_numbers_of_autograd_functions_are_those_of_a_process(tmp_path):
    """torch counts their classes: another process may have imported others before."""
    program = (
        "import sys, torch, fxpasses\n"
        "for _ in range(int(sys.argv[1])):\n"
        "    type('Other', (torch.autograd.Function,), {})\n"
        "from scaling import scale\n"
        "result = fxpasses.compile(scale, cache=sys.argv[2])(torch.ones(2, requires_grad=True))\n"
        "result.sum().backward()\n"
        "print(result.tolist(), fxpasses.stats().plans_used)\n"
    )
    (tmp_path / "scaling.py").write_text(
        "import torch\n"
        "class Scale(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x):\n"
        "        return x * 2\n"
        "    @staticmethod\n"
        "    def backward(ctx, gradient):\n"
        "        return gradient * 2\n"
        "def scale(x):\n"
        "    return Scale.apply(x) + 1\n"
    )
    (tmp_path / "program.py").write_text(program)
    said = [
        subprocess.run(
            [sys.executable, "program.py", number, str(tmp_path / "cache")],
            cwd=tmp_path, capture_output=True, text=True, check=True, timeout=200,
        ).stdout
        for number in ("0", "3")
    ]  # fmt: skip
    assert said == ["[3.0, 3.0] 0\n", "[3.0, 3.0] 1\n"]


def _doubled(module, args, output):
    return output * 2


def _doubled_with_kwargs(module, args, kwargs, output):
    return output * 2
