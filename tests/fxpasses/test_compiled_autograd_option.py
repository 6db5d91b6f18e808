"""``options={"compiled_autograd": True}``: backward passes through compiled graphs are captured."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import compiled_autograd
import fake
from compiled_autograd.session.node_sessions import node_sessions
from fake.seam.patches import LEDGER, When
from tests.compiled_autograd.support import assert_same
from tests.compiled_autograd.test_traced_hooks import trained

pytestmark = pytest.mark.usefixtures("old_objects_aside")

OPTIONS = {"compiled_autograd": True, "compiler": "eager"}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    compiled_autograd.reset()
    yield
    torch._dynamo.reset()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in module.parameters()]


@pytest.mark.slow
def test_the_backward_pass_is_captured_once_and_right() -> None:
    eager, compiled_model = model(), model()
    compiled = torch.compile(compiled_model, backend="fxpasses", options=OPTIONS)
    for step in range(3):
        x = torch.randn(3, 4)
        for run, module in ((eager, eager), (compiled, compiled_model)):
            module.zero_grad()
            (run(x) ** 2).mean().backward()
        for mine, theirs in zip(gradients(compiled_model), gradients(eager), strict=True):
            torch.testing.assert_close(mine, theirs)
        stats = compiled_autograd.stats()
        assert (stats.captures, stats.hits, stats.fallbacks) == (1, step, 0)


@pytest.mark.slow
def test_a_step_that_calls_backward_itself_is_captured() -> None:
    eager, compiled_model = model(), model()

    def step(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = (module(x) ** 2).mean()
        loss.backward()
        return loss

    compiled = torch.compile(step, backend="fxpasses", options=OPTIONS)
    for batch in (3, 4, 5):
        x = torch.randn(batch, 4)
        torch.testing.assert_close(compiled(compiled_model, x), step(eager, x))
    for mine, theirs in zip(gradients(compiled_model), gradients(eager), strict=True):
        torch.testing.assert_close(mine, theirs)
    stats = compiled_autograd.stats()
    assert stats.captures
    assert not stats.fallbacks
    assert not stats.uncompiled_reasons


def test_hooks_outside_of_the_compiled_graph_run() -> None:
    module, seen = model(), []
    weight = module[0].weight
    weight.register_hook(lambda gradient: seen.append("tensor") or 2 * gradient)
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    torch.compile(module, backend="fxpasses", options=OPTIONS)(torch.ones(3, 4)).sum().backward()
    expected = model()
    expected(torch.ones(3, 4)).sum().backward()
    assert seen == ["tensor", "accumulated"]
    torch.testing.assert_close(weight.grad, 2 * expected[0].weight.grad)
    assert compiled_autograd.stats().captures == 1


def test_other_backward_passes_are_left_alone() -> None:
    torch.compile(model(), backend="fxpasses", options=OPTIONS)(torch.ones(3, 4)).sum().backward()
    x = torch.ones(3, requires_grad=True)
    (x * x).sum().backward()
    assert compiled_autograd.stats().captures == 1


def test_disable_counts_for_more() -> None:
    result = torch.compile(model(), backend="fxpasses", options=OPTIONS)(torch.ones(3, 4))
    with compiled_autograd.disable():
        result.sum().backward()
    assert compiled_autograd.stats().captures == 0


def test_an_inference_call_first_does_not_keep_training_from_being_captured() -> None:
    compiled = torch.compile(model(), backend="fxpasses", options=OPTIONS)
    with torch.no_grad():
        compiled(torch.ones(3, 4))
    compiled(torch.ones(3, 4)).sum().backward()
    assert compiled_autograd.stats().captures == 1


def test_dynamic_sizes_need_one_graph() -> None:
    module = model()
    compiled = torch.compile(module, backend="fxpasses", options=OPTIONS, dynamic=True)
    for batch in (3, 5, 7):
        module.zero_grad()  # the first accumulation into .grad is another graph than the next ones
        compiled(torch.randn(batch, 4)).sum().backward()
    assert compiled_autograd.stats().captures == 1


def test_what_is_kept_for_a_second_pass_is_not_overwritten() -> None:
    """Compiled code may reuse the memory of saved tensors only where the pass does not keep its graph."""
    module, expected = model(), model()
    compiled = torch.compile(module, backend="fxpasses", options=OPTIONS, dynamic=True)
    for run in (compiled, expected):
        first, second = (run(torch.ones(batch, 4)).sum() for batch in (3, 5))
        first.backward()
        second.backward(retain_graph=True)
        second.backward()
    for mine, theirs in zip(gradients(module), gradients(expected), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_with_inductor() -> None:
    eager, compiled_model = model(), model()
    compiled = torch.compile(compiled_model, backend="fxpasses", options={"compiled_autograd": True})
    x = torch.randn(3, 4)
    for run in (eager, compiled):
        run(x).sum().backward()
    for mine, theirs in zip(gradients(compiled_model), gradients(eager), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert compiled_autograd.stats().captures == 1


@pytest.mark.parametrize("around", [contextlib.nullcontext, fake.accelerate])
def test_torchs_own_compiled_autograd_takes_the_backend(around: Any) -> None:
    module = model()

    @torch.compile(backend="fxpasses", options={"compiler": "eager"})
    def step(x: torch.Tensor) -> None:
        module(x).sum().backward()

    with around(), torch._dynamo.config.patch(compiled_autograd=True):
        step(torch.ones(3, 4))
    expected = model()
    expected(torch.ones(3, 4)).sum().backward()
    for mine, theirs in zip(gradients(module), gradients(expected), strict=True):
        torch.testing.assert_close(mine, theirs)


def training_step(run: Any, x: torch.Tensor) -> torch.Tensor:
    loss = run(x).sum()
    loss.backward()
    return loss


@pytest.mark.parametrize("whole", [False, True], ids=["model", "step"])
def test_nothing_stays_installed_once_the_compiled_graphs_are_gone(whole: bool) -> None:
    gc.collect()
    entry = LEDGER.of(When.SESSION)[0]
    assert LEDGER.users(entry) == len(node_sessions._sessions) == 0
    what = training_step if whole else model()
    compiled: Any = torch.compile(what, backend="fxpasses", options=OPTIONS)
    for batch in (3, 4, 5):
        compiled(model(), torch.ones(batch, 4)) if whole else training_step(compiled, torch.ones(batch, 4))
    assert LEDGER.users(entry) > 0
    del compiled, what
    torch._dynamo.reset()
    compiled_autograd.reset()
    gc.collect()
    assert LEDGER.users(entry) == len(node_sessions._sessions) == 0


def test_only_python_nodes_can_be_named() -> None:
    with pytest.raises(TypeError, match=r"autograd\.Function"):
        compiled_autograd.capture_through(
            type((torch.ones(1, requires_grad=True) * 2).grad_fn), lambda graph: graph
        )


@pytest.mark.slow
@pytest.mark.parametrize("options", [OPTIONS, {"compiled_autograd": True}], ids=["eager", "inductor"])
def test_hooks_of_one_graph_run_in_the_captured_pass(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Dynamo meets the hooks before the backend is asked for anything."""
    expected = trained(lambda model: model)
    got = trained(lambda model: torch.compile(model, backend="fxpasses", fullgraph=True, options=options))
    assert_same(expected, got)
    stats = compiled_autograd.stats()
    assert stats.captures
    assert not stats.fallbacks
    assert not stats.called_reasons
    assert not stats.uncompiled_reasons
    assert "failed to eagerly compile backwards" not in caplog.text
    torch._dynamo.reset()
    gc.collect()  # hooks and graphs are cycles; what they hold keeps capturing installed


def test_hooks_of_one_graph_that_is_compiled_while_capturing_is_off() -> None:
    with compiled_autograd.disable(), pytest.raises(torch._dynamo.exc.Unsupported, match="backwards hooks"):
        trained(lambda model: torch.compile(model, backend="fxpasses", fullgraph=True, options=OPTIONS))
