"""Backward passes of several threads: captured, compiled, and in eager beside those."""

import contextlib
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx._symbolic_trace import is_fx_tracing

import compiled_autograd
from compiled_autograd.capture.recorder import PassRecorder
from fake.tracing.compiling import compiling
from tests.compiled_autograd.support import dynamo_eager, keep

COUNT = 4


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """What they return, begun together; the first error of any is raised."""
    barrier, results, errors = threading.Barrier(len(functions)), {}, []

    def run(index: int) -> None:
        barrier.wait()
        try:
            results[index] = functions[index]()
        except BaseException as error:  # noqa: BLE001 - of another thread: raised in this one
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(functions))]


def process_wide() -> dict[str, Any]:
    return {
        "anomaly": torch.is_anomaly_enabled(),
        "fx": is_fx_tracing(),
        "compiling": torch.compiler.is_compiling(),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "engine": torch.autograd.Variable._execution_engine,
        "hook": torch._C._dynamo.compiled_autograd.set_autograd_compiler,
        "register_hook": torch.Tensor.register_hook,
    }


def training(depth: int, compiler: Any, sizes: tuple[int, ...] = (3, 4, 3)) -> list[torch.Tensor]:
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(depth))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    for size in sizes:
        around = contextlib.nullcontext() if compiler is None else compiled_autograd.enable(compiler)
        with around:
            model(torch.linspace(0, 1, size * 4).view(size, 4)).sin().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [keep, "aot_eager", dynamo_eager])
@pytest.mark.parametrize("depths", [(2, 2, 2, 2), (1, 2, 3, 4)], ids=["same graph", "other graphs"])
def test_threads_leave_the_process_as_it_was(compiler, depths):
    expected = [training(depth, None) for depth in depths]
    before = process_wide()
    for _ in range(2):
        torch._dynamo.reset()
        compiled_autograd.reset()
        results = in_threads(*(lambda depth=depth: training(depth, compiler) for depth in depths))
        torch.testing.assert_close(results, expected)
        assert process_wide() == before
        stats = compiled_autograd.stats()
        assert (stats.fallbacks, stats.uncompiled_reasons) == (0, {})
        assert stats.captures == len(set(depths)) * 2  # without and with .grad
    assert torch.compile(lambda x: x.sin(), backend="eager")(torch.zeros(2)).sum() == 0


def test_eager_passes_wait_for_a_walk_of_another_thread(monkeypatch):
    walking, may_end = threading.Event(), threading.Event()
    begin = PassRecorder.begin_capture

    def slow(self, *args, **kwargs):
        walking.set()
        may_end.wait(0.5)
        return begin(self, *args, **kwargs)

    monkeypatch.setattr(PassRecorder, "begin_capture", slow)

    def captured():
        x = torch.ones(3, requires_grad=True)
        with compiled_autograd.enable(keep):
            x.exp().sum().backward()
        return x.grad

    def beside():
        walking.wait()
        x = torch.ones(3, requires_grad=True)
        x.square().sum().backward()
        return x.grad

    def transformed():
        walking.wait()
        return torch.func.grad(lambda x: x.square().sum())(torch.ones(3))

    one, *others = in_threads(captured, beside, beside, transformed)
    torch.testing.assert_close(one, torch.ones(3).exp())
    torch.testing.assert_close(others, [torch.full((3,), 2.0)] * 3)
    assert (compiled_autograd.stats().captures, compiled_autograd.stats().fallbacks) == (1, 0)
    x = torch.ones(3, requires_grad=True)
    x.square().sum().backward()  # the hook of the walk is nowhere
    assert not torch._dynamo.compiled_autograd.compiled_autograd_enabled


def test_an_error_in_one_thread_is_its_own():
    def failing():
        x = torch.ones(3, requires_grad=True)
        y = x.exp()
        y.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError), compiled_autograd.enable("aot_eager"):
            y.sum().backward()

    before = process_wide()
    expected = training(2, None)
    failed, *others = in_threads(failing, *(lambda: training(2, "aot_eager"),) * 3)
    assert failed is None
    torch.testing.assert_close(others, [expected] * 3)
    assert process_wide() == before


def test_a_trace_of_another_thread_is_not_anomaly_mode():
    tracing, may_end = threading.Event(), threading.Event()

    def tracer():
        with compiling(), torch.autograd.detect_anomaly(check_nan=False):
            tracing.set()
            may_end.wait(0.3)

    def captured():
        tracing.wait()
        training(2, keep, (3,))

    in_threads(tracer, captured)
    assert not compiled_autograd.stats().fallbacks
    with torch.autograd.detect_anomaly(check_nan=False):
        training(2, keep, (3,))
    assert compiled_autograd.stats().fallback_reasons == {"anomaly mode": 1}
