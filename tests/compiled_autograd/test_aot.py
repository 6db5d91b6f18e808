"""Backward graphs of functions that torch.compile made, inlined into captured passes."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._functorch._aot_autograd.aot_autograd_result import serialize_graph_module
from torch._functorch._aot_autograd.runtime_wrappers import CachedAutogradLazyBackwardCompileInfo
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor

import compiled_autograd
from compiled_autograd.runtime import functional
from tests.compiled_autograd.support import COMPILERS, check, fresh, grads, keep, mlp

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A function as AOTAutograd makes it, without a compiler behind it."""
    return torch.compile(function, backend="aot_eager", **options)


def targets(graph: torch.fx.GraphModule) -> list[Any]:
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def test_the_graph_of_a_pass_holds_the_operators_of_a_compiled_function() -> None:
    model = mlp()
    block = compiled(model)
    report = compiled_autograd.explain(lambda: block(torch.ones(2, 4)).sin().sum().backward())
    called = targets(report.graphs[0])
    assert torch.ops.aten.mm.default in called
    assert functional.call_backward not in called
    assert report.captures[0].inlined == ("CompiledFunctionBackward",)
    assert report.captures[0].called == ()
    names = [node.name for node in report.graphs[0].graph.nodes if node.target is torch.ops.aten.mm.default]
    assert names
    assert all(name.startswith("aot") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", COMPILERS)
def test_blocks_in_eager_models_with_hooks_between_and_sizes_that_change(compiler: Any) -> None:
    def function() -> Any:
        torch._dynamo.reset()
        first, second = mlp(), mlp()
        one, two = compiled(first), compiled(second)
        for size in (10, 20, 30, 10):
            seen: list[Any] = []
            middle = one(torch.randn(size, 4))
            middle.register_hook(lambda grad, seen=seen: (seen.append(grad.clone()), grad * 2)[1])
            node = middle.grad_fn
            node.register_prehook(lambda grads, seen=seen: seen.append(grads[0].clone()))
            node.register_hook(lambda grads, _, seen=seen: seen.append([g is None for g in grads]))
            two(one(middle)).sum().backward()
            yield from (grads(first), grads(second), seen)

    stats = check(function, compiler)
    assert stats.inlined > 0
    assert not stats.called_reasons


class Stash(torch.autograd.Function):
    """Keeps a tensor on its context, and counts its backward passes in another."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, calls: torch.Tensor) -> torch.Tensor:
        ctx.sine, ctx.calls = x.sin(), calls
        ctx.save_for_backward(x)
        return x * ctx.sine

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        ctx.calls.add_(1)
        return grad * (ctx.sine + x * x.cos()), None


@pytest.mark.parametrize("compiler", COMPILERS)
def test_tensors_that_the_engine_does_not_see_constants_and_changes_in_the_backward(compiler: Any) -> None:
    def function() -> Any:
        torch._dynamo.reset()
        model, calls = mlp(), torch.zeros(1)
        block = compiled(lambda x: Stash.apply(model(x), calls) * torch.tensor([1.0, 2.0, 3.0, 4.0]))
        for _ in range(3):
            block(torch.randn(2, 4)).sum().backward()
            yield from (grads(model), calls.clone())

    assert check(function, compiler).inlined > 0


class OnlyFirst(torch.autograd.Function):
    """Two results, of which only the first has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 1, y * 1

    @staticmethod
    def backward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x, None


@pytest.mark.parametrize("dynamic", [False, True])
def test_missing_gradients_are_zeros(dynamic: bool) -> None:
    def function() -> Any:
        torch._dynamo.reset()
        layer = torch.nn.Linear(4, 4)
        block = compiled(lambda x: (layer(x).sin(), layer(x).cos()), dynamic=dynamic)
        for size in (2, 3, 5):
            x, y = block(torch.randn(size, 4))
            x.sum().backward()  # C++ sees that the other is missing
            yield grads(layer)
            x, y = OnlyFirst.apply(*block(torch.randn(size, 4)))
            (x + y).sum().backward()  # only the run shows it
            yield grads(layer)

    stats = check(function)
    assert stats.inlined > 0
    assert not stats.called_reasons


def test_a_gradient_in_another_layout_than_the_traced_one_is_copied() -> None:
    def function() -> Any:
        torch._dynamo.reset()
        model = torch.nn.Conv2d(2, 3, 1)
        block = compiled(lambda x: model(x).view(2, -1))
        weight = torch.randn(12, 2)
        block(torch.randn(2, 2, 2, 2)).mul(weight.t()).sum().backward()
        return grads(model)

    assert check(function).inlined == 1


def test_tensor_subclasses_are_taken_apart_around_the_graph() -> None:
    def function() -> Any:
        torch._dynamo.reset()
        layer = torch.nn.Linear(4, 4)
        block = compiled(lambda x: layer(x).sin())
        for _ in range(2):
            x = TwoTensor(torch.randn(2, 4), torch.randn(2, 4)).requires_grad_()
            block(x).sum().backward()
            yield from (x.grad.a, x.grad.b)

    stats = check(function)
    assert stats.inlined == stats.captures
    assert not stats.called_reasons


def test_saved_tensors_are_freed_in_the_middle_of_the_pass_and_a_second_pass_raises() -> None:
    first, second = mlp(), mlp()
    one, two = compiled(first), compiled(second)
    freed: list[bool] = []
    middle = one(torch.ones(2, 4))
    loss = two(middle * 2)
    inputs = {p.untyped_storage()._cdata for p in (*second.parameters(), loss)}
    saved = [
        StorageWeakRef(tensor.untyped_storage())
        for tensor in loss.grad_fn.saved_tensors
        if tensor.untyped_storage()._cdata not in inputs
    ]
    assert saved
    middle.register_hook(lambda grad: freed.extend(storage.expired() for storage in saved))
    del inputs
    total = loss.sum()
    del loss
    with fresh():
        total.backward()
        assert freed
        assert all(freed)
        assert compiled_autograd.stats().inlined == 2
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            total.backward()


def test_passes_whose_settings_forbid_it_call_the_compiled_backward() -> None:
    model = mlp()
    twin = copy.deepcopy(model)
    block = compiled(model)
    x = torch.randn(2, 4, requires_grad=True)
    with fresh():
        for create_graph in (False, True, False):
            (gradient,) = torch.autograd.grad(block(x).sum(), x, create_graph=create_graph)
            torch.testing.assert_close(gradient.detach(), torch.autograd.grad(twin(x).sum(), x)[0])
            assert gradient.requires_grad is create_graph
            if create_graph:
                with pytest.raises(RuntimeError, match="does not currently support double backward"):
                    gradient.sum().backward()
        with torch.autocast("cpu", torch.bfloat16):
            result = block(x).float().sum()
            result.backward()
        reasons = compiled_autograd.stats().called_reasons
    assert reasons == {"the result is differentiated again": 1, "autocast is on in the backward pass": 1}


def test_a_backward_graph_is_read_from_a_cache_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    model(torch.ones(2, 4)).sum().backward()
    expected = grads(model)
    model.zero_grad()
    loss = compiled(lambda x: model(x) * torch.tensor([1.0, 1.0, 1.0, 1.0]))(torch.ones(2, 4)).sum()
    function = loss.grad_fn.next_functions[0][0]._forward_cls
    stored = serialize_graph_module(function._lazy_backward_info.bw_module)
    monkeypatch.setattr(
        function, "_lazy_backward_info", CachedAutogradLazyBackwardCompileInfo(stored.deserialize)
    )
    with fresh():
        loss.backward()
    assert compiled_autograd.stats().inlined == 1
    torch.testing.assert_close(grads(model), expected)


def test_a_function_without_its_backward_graph_stays_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    block = compiled(mlp())
    result = block(torch.ones(2, 4))
    monkeypatch.setattr(result.grad_fn._forward_cls, "_lazy_backward_info", None)
    report = compiled_autograd.explain(lambda: result.sum().backward(retain_graph=True))
    assert functional.call_backward in targets(report.graphs[0])
    ((name, reason),) = report.captures[0].called
    assert name == "CompiledFunctionBackward"
    assert "compile cache" in reason
    assert f"{name} stays a call: {reason}" in str(report)


def test_an_inlined_graph_is_written_and_read_back(tmp_path: Any) -> None:
    model = mlp()
    block = compiled(model)
    report = compiled_autograd.explain(lambda: block(torch.ones(2, 4)).sum().backward())
    graph, path = report.graphs[0], tmp_path / "graph.py"
    compiled_autograd.save_graph(graph, path)
    expected, calls = grads(model), []
    model.zero_grad()

    def reload(_: Any) -> Any:
        loaded = compiled_autograd.load_graph(path)
        return lambda *arguments: (calls.append(1), loaded(*arguments))[1]

    with compiled_autograd.enable(reload):
        block(torch.ones(2, 4)).sum().backward()
    assert calls
    torch.testing.assert_close(grads(model), expected)

    constant = compiled(lambda x: model(x) * torch.tensor([1.0, 2.0, 3.0, 4.0]))
    report = compiled_autograd.explain(lambda: constant(torch.ones(2, 4)).sum().backward())
    with pytest.raises(compiled_autograd.GraphReloadError, match="constant"):
        compiled_autograd.save_graph(report.graphs[0], path)


def test_saved_tensor_hooks_around_a_compiled_function_unpack_once_each() -> None:
    def function() -> Any:
        torch._dynamo.reset()
        model, log = mlp(), []
        block = compiled(model)
        for _ in range(2):
            with torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: (log.append("pack"), tensor.clone())[1],
                lambda tensor: (log.append("unpack"), tensor)[1],
            ):
                loss = block(torch.randn(2, 4)).sum()
            loss.backward()
            yield grads(model)
        yield log

    assert check(function, keep).inlined > 0


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_hook_that_raises_leaves_the_gradients_that_eager_leaves(compiler: Any) -> None:
    """Leaves of a compiled function take their turns as in the function that was compiled."""

    def run(make: Callable[..., Any]) -> tuple[list[int], list[Any]]:
        torch.manual_seed(0)
        model, seen = mlp(), []

        def note(index: int, _: torch.Tensor) -> None:
            seen.append(index)
            assert index != 2, "stop"

        for index, parameter in enumerate(model.parameters()):
            parameter.register_post_accumulate_grad_hook(functools.partial(note, index))
        loss = make(model)(torch.ones(2, 4)).sum()
        with pytest.raises(AssertionError, match="stop"):
            loss.backward()
        return seen, grads(model)

    expected = run(lambda model: model)
    with fresh(compiler):
        seen, gradients = run(compiled)
    assert seen == expected[0]
    torch.testing.assert_close(gradients, expected[1])
    assert None in gradients


def test_a_leaf_of_a_compiled_function_whose_turn_is_to_come_gets_no_hook() -> None:
    model = mlp()
    first, last = list(model.parameters())[:: len(list(model.parameters())) - 1]
    last.register_hook(lambda _: first.register_hook(lambda grad: grad * 2) and None)
    with fresh(keep), pytest.raises(compiled_autograd.LateHookError):
        compiled(model)(torch.ones(2, 4)).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [keep, "inductor"], ids=["keep", "inductor"])
def test_dropout_that_is_computed_again_draws_the_mask_of_the_forward(compiler: Any) -> None:
    """Inductor's forward draws from a seed, which eager's kernels ignore."""
    weight = torch.ones(64, requires_grad=True)

    def dropped(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x * weight, 0.5).sin()

    @torch.compile(backend="inductor")
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(dropped, x, use_reentrant=False)

    with fresh(compiler):
        for _ in range(2):
            weight.grad = None
            out = function(torch.full((64,), 0.3))
            out.sum().backward()
            assert 0 < int((out == 0).sum()) < 64
            assert torch.equal(weight.grad == 0, out == 0)
    (reason,) = compiled_autograd.stats().called_reasons
    assert "seed" in reason
