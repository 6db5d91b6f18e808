"""Training steps that call backward inside of a compiled function: Dynamo's frame hook is on while we capture and run."""

import contextlib

import pytest
import torch

import compiled_autograd
from tests.compiled_autograd.support import assert_same, dynamo_eager, flat, grads, keep, mlp

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

ENABLED = [
    pytest.param(lambda: compiled_autograd.enable(keep), id="keep"),
    pytest.param(lambda: compiled_autograd.enable(flat), id="flat"),
    pytest.param(lambda: compiled_autograd.enable("aot_eager"), id="aot_eager"),
    pytest.param(lambda: compiled_autograd.enable(dynamo_eager), id="dynamo"),
    pytest.param(lambda: compiled_autograd.enable(keep, dynamic=False), id="static"),
]


def run(step, batches, around=contextlib.nullcontext, compiled=None):
    """Losses and gradients of a model that takes the steps; ``step(model, batch)`` accumulates."""
    torch.manual_seed(0)
    model = mlp()
    step = step if compiled is None else compiled(step)
    results = []
    for number, batch in enumerate(batches):
        with around():
            torch.manual_seed(number)
            results.append((step(model, torch.randn(batch, 4)).detach(), grads(model)))
    return results


def one_loss(model, x):
    loss = model(x).square().mean()
    loss.backward()
    return loss


def functional_gradients(model, x):
    loss = model(x).square().mean()
    found = torch.autograd.grad(loss, list(model.parameters()))
    for parameter, grad in zip(model.parameters(), found, strict=True):
        parameter.grad = grad * 2
    return loss


@pytest.mark.parametrize(("step", "dynamic"), [(one_loss, None), (functional_gradients, True)])
@pytest.mark.parametrize("around", ENABLED)
def test_a_compiled_step_is_captured(around, dynamic, step):
    expected = run(step, (3, 4, 5))
    found = run(step, (3, 4, 5), around, lambda f: torch.compile(f, backend="eager", dynamic=dynamic))
    assert_same(expected, found)
    stats = compiled_autograd.stats()
    assert stats.captures
    assert not stats.fallbacks
    assert not stats.uncompiled_reasons


def test_enable_inside_of_the_compiled_function():
    def step(model, x):
        loss = model(x).square().mean()
        with compiled_autograd.enable(keep):
            loss.backward(retain_graph=True)
            with compiled_autograd.disable():
                loss.backward()
        return loss

    expected = run(step, (3, 4, 5))
    compiled_autograd.reset()
    assert_same(expected, run(step, (3, 4, 5), compiled=lambda f: torch.compile(f, backend="eager")))
    stats = compiled_autograd.stats()
    assert stats.captures + stats.hits == 3


def test_what_a_compiler_compiles_is_compiled_inside_of_a_compiled_function_too():
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    outer = []

    def outside(graph, example_inputs):
        outer.append(graph)
        return graph.forward

    with compiled_autograd.enable(lambda graph: torch.compile(graph, backend=count)):
        run(one_loss, (3,), compiled=lambda f: torch.compile(f, backend=outside))
    assert len(graphs) == 1
    assert outer
    assert all("backward" not in node.name for graph in outer for node in graph.graph.nodes)


def test_compiled_user_code_in_a_captured_pass_is_compiled():
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    double = torch.compile(lambda grad: grad * 2 + 1, backend=count)

    def step(x):
        x.sin().sum().backward()

    with compiled_autograd.enable(keep):
        for _ in range(2):
            x = torch.ones(3, requires_grad=True)
            x.register_hook(double)
            torch.compile(step, backend="eager")(x)
    torch.testing.assert_close(x.grad, torch.ones(3).cos() * 2 + 1)
    assert len(graphs) == 1


def test_dynamos_frame_hook_is_back_after_a_capture():
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    def step(x):
        x.sin().sum().backward()
        return x.grad.cos() * 2

    for raises in (False, True):
        graphs.clear()
        torch._dynamo.reset()
        x = torch.ones(3, requires_grad=True)
        if raises:

            def refuse(grad):
                raise ValueError("no")

            x.register_hook(refuse)
        with (
            compiled_autograd.enable(keep),
            pytest.raises(ValueError) if raises else contextlib.nullcontext(),
        ):
            torch.compile(step, backend=count)(x)
        assert len(graphs) == (1 if raises else 2)
        assert torch._C._dynamo.eval_frame.get_eval_frame_callback() is None
