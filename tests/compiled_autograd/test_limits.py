"""Errors, unusual tensors, and what runs in eager instead, against eager."""

import threading
from typing import Any

import pytest
import torch

import compiled_autograd
from tests.compiled_autograd.support import COMPILERS, assert_same, check, fresh

compilers = pytest.mark.parametrize("compiler", COMPILERS)


def test_unused_input_error_is_eagers():
    """Its text names the place of the input, on the releases of torch that do."""
    texts = []
    for capturing in (compiled_autograd.disable, fresh):
        x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        with capturing(), pytest.raises(RuntimeError) as error:
            torch.autograd.grad(x.sum(), [x, x, y, y])
        texts.append(str(error.value))
    assert texts[0] == texts[1]


def test_very_deep_nesting_ends_in_eager():
    def deep():
        class Deep(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, depth):
                ctx.depth = depth
                return x * 1

            @staticmethod
            def backward(ctx, grad):
                if ctx.depth:
                    with torch.enable_grad():
                        x = torch.ones(1, requires_grad=True)
                        Deep.apply(x, ctx.depth - 1).sum().backward()
                return grad * (ctx.depth + 1), None

        x = torch.ones(1, requires_grad=True)
        Deep.apply(x, 30).sum().backward()
        return x.grad

    with compiled_autograd.config.patch(max_nested_captures=3):
        compiled_autograd.reset()
        with compiled_autograd.enable(lambda graph: graph):
            result = deep()
    torch.testing.assert_close(result, torch.full((1,), 31.0))
    reasons = compiled_autograd.stats().fallback_reasons
    assert any("max_nested_captures = 3" in reason for reason in reasons)


def test_saved_tensor_hooks_under_create_graph_run_in_eager():
    def packed():
        x = torch.randn(3, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            y = (x**3).sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(grad.sum(), x)[0]

    check(packed, fallbacks=1)


def test_sparse_gradients():
    def sparse():
        embedding = torch.nn.Embedding(10, 3, sparse=True)
        embedding(torch.tensor([1, 2, 2])).sum().backward()
        yield embedding.weight.grad.coalesce()
        embedding(torch.tensor([4])).sum().backward()
        yield embedding.weight.grad.coalesce()
        (embedding(torch.tensor([4])).sum() + embedding.weight.sum()).backward()
        yield embedding.weight.grad

    check(sparse, lambda graph, inputs: graph.forward)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without mkldnn")
def test_mkldnn_gradients():
    def converted():
        x = torch.randn(4, 4, requires_grad=True)
        x.to_mkldnn().to_dense().exp().sum().backward()
        return x.grad

    check(converted, lambda graph, inputs: graph.forward)


def error_of(function):
    with pytest.raises(RuntimeError) as caught:
        function()
    return str(caught.value)


def test_backward_a_second_time_is_eagers_error():
    def twice():
        x = torch.randn(3, requires_grad=True)
        y = x.exp().sum()
        y.backward()
        y.backward()

    expected = error_of(twice)
    with fresh():
        assert error_of(twice) == expected


def test_version_counter_is_eagers_error():
    def changed():
        x = torch.randn(3, requires_grad=True)
        y = x.exp()
        y.add_(1)
        y.sum().backward()

    expected = error_of(changed)
    with fresh():
        assert error_of(changed) == expected


def test_a_pass_after_a_failed_one():
    x = torch.randn(3, requires_grad=True)
    y = x.exp()
    handle = y.register_hook(lambda g: 1 / 0)
    loss = y.sum()
    with fresh():
        with pytest.raises(ZeroDivisionError):
            loss.backward(retain_graph=True)
        handle.remove()
        loss.backward()
    torch.testing.assert_close(x.grad, x.exp())


def test_anomaly_mode_runs_in_eager():
    def anomaly():
        x = torch.tensor([-1.0], requires_grad=True)
        with torch.autograd.detect_anomaly(check_nan=True):
            y = x.sqrt().sum()
            with pytest.raises(RuntimeError, match="returned nan values"):
                y.backward()
        return x.grad

    with pytest.warns(UserWarning, match="Anomaly Detection"):
        stats = check(anomaly, captures=0, fallbacks=1)
    assert stats.fallback_reasons == {"anomaly mode": 1}


def test_a_dispatch_mode_runs_in_eager():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.calls += 1
            return func(*args, **(kwargs or {}))

    def counted():
        Count.calls = 0
        x = torch.randn(3, requires_grad=True)
        with Count():
            x.exp().sum().backward()
        return x.grad, Count.calls

    check(counted, captures=0, fallbacks=1)


def test_forward_over_reverse():
    def mixed():
        x, tangent = torch.randn(3, requires_grad=True), torch.randn(3)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            (grad,) = torch.autograd.grad((dual**3).sum(), dual)
            return torch.autograd.forward_ad.unpack_dual(grad)

    check(lambda: [part.detach() for part in mixed()])


def test_batched_grads():
    def batched():
        x = torch.randn(3, requires_grad=True)
        y = x.exp() * torch.randn(3)
        (grad,) = torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)
        return grad

    check(batched, lambda graph, inputs: graph.forward)


def test_functorch_transforms():
    def transformed():
        x = torch.randn(3)
        yield torch.func.grad(lambda t: (t**3).sum())(x)
        yield torch.func.hessian(lambda t: (t**3).sum())(x)
        yield torch.func.vmap(torch.func.grad(lambda t: (t**3).sum()))(torch.randn(2, 3))

    check(transformed, lambda graph, inputs: graph.forward)


def test_functions_of_ended_transforms():
    def transformed():
        x = torch.arange(3.0)
        yield torch.func.jacrev(lambda t: t.exp() * t.sum())(x)
        _, backward = torch.func.vjp(lambda a, b: (a * b.detach()).sin(), x, x + 1)
        yield from backward(torch.ones(3))  # of b, nothing is used

    check(transformed, lambda graph, inputs: graph.forward, captures=2)


def test_nested_tensors_run_in_eager():
    def nested():
        a, b = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
        stacked = torch.nested.as_nested_tensor([a, b])
        torch.nested.to_padded_tensor(stacked, 0.0).exp().sum().backward()
        return a.grad, b.grad

    stats = check(nested, captures=0, fallbacks=1)
    assert "a NestedTensor gradient" in stats.fallback_reasons


def test_a_compiled_function_of_ragged_rows_runs_in_eager():
    compiled = torch.compile(lambda rows: rows.sin().values(), backend="aot_eager")

    def ragged():
        rows = [torch.randn(n, 3, requires_grad=True) for n in (2, 4)]
        compiled(torch.nested.as_nested_tensor(rows, layout=torch.jagged)).sum().backward()
        return [row.grad for row in rows]

    stats = check(ragged, captures=0, fallbacks=1)
    assert "a ragged size that a node saved" in stats.fallback_reasons


def test_passes_of_other_threads_are_eager_unless_they_enable():
    results = {}
    x = torch.ones(3, requires_grad=True)

    def work():
        y = torch.ones(3, requires_grad=True)
        y.exp().sum().backward()
        with compiled_autograd.enable(lambda graph: graph):
            y.exp().sum().backward()
        results["grad"] = y.grad

    with fresh():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        x.exp().sum().backward()
    torch.testing.assert_close(results["grad"], 2 * x.exp().detach())
    stats = compiled_autograd.stats()
    assert stats.captures + stats.hits == 2


def test_a_compiler_that_fails_on_random_numbers_fails_at_no_later_pass() -> None:
    """Such a segment is not run when it is compiled, and Dynamo calls its backend when it runs."""

    def refuses(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        raise NotImplementedError("no random numbers")

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * torch.rand_like(grad)

    torch._dynamo.reset()
    function = torch.compile(lambda x: Noisy.apply(x).sin(), backend="aot_eager", fullgraph=True)

    def passes() -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        found = []
        for _ in range(3):
            x = torch.ones(4, requires_grad=True)
            function(x).sum().backward()
            found.append(x.grad)
        return found

    expected = passes()
    with fresh(lambda graph: torch.compile(graph, backend=refuses)):
        assert_same(expected, passes())
    (reason,) = compiled_autograd.stats().uncompiled_reasons
    assert "no random numbers" in reason
