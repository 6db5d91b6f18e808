"""Which gradients, graphs kept or not, higher derivatives, nesting, memory rules: against eager."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import compiled_autograd
from tests.compiled_autograd.support import COMPILERS, check, fresh, grads, mlp

compilers = pytest.mark.parametrize("compiler", COMPILERS)


@compilers
def test_training_steps_hit_the_cache(compiler):
    def steps():
        model = mlp()
        for _ in range(4):
            model.zero_grad()
            model(torch.randn(2, 4)).sum().backward()
            yield grads(model)

    stats = check(steps, compiler, captures=1)
    assert (stats.hits, stats.compiles) == (3, 1)


@compilers
def test_grad_and_inputs(compiler):
    class Unreachable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise AssertionError("must not run")

    def wanted():
        x, y, z = (torch.randn(3, requires_grad=True) for _ in range(3))
        hidden = x * y
        loss = (hidden * Unreachable.apply(z)).sum()
        yield torch.autograd.grad(loss, [y, hidden], retain_graph=True)
        yield x.grad
        loss.backward(inputs=[x, hidden], retain_graph=True)
        yield [x.grad, y.grad, hidden.grad]
        yield torch.autograd.grad(loss, [x, torch.ones(1, requires_grad=True)], allow_unused=True)

    check(wanted, compiler)


@compilers
def test_accumulation_keeps_the_identity_of_grad(compiler):
    def accumulate():
        model = mlp()
        for p in model.parameters():
            p.grad = torch.rand_like(p)
        before = [p.grad for p in model.parameters()]
        for _ in range(2):
            model(torch.randn(3, 4)).sum().backward()
        yield [p.grad is old for p, old in zip(model.parameters(), before, strict=True)]
        yield grads(model)

    check(accumulate, compiler)


def test_buffers_are_taken_over_as_in_eager():
    def ownership():
        class Give(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, y):
                return x + y

            @staticmethod
            def backward(ctx, grad):
                Give.pointer = grad.data_ptr()
                return grad, grad

        def once():
            x, y = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
            Give.apply(x, y).exp().sum().backward()
            shared = x.grad.data_ptr() == y.grad.data_ptr()
            return shared, Give.pointer in (x.grad.data_ptr(), y.grad.data_ptr())

        # a tool that looks at frames (a tracer, a profiler) holds what a frame holds, and then a buffer is copied
        runs = [once() for _ in range(5)]
        return any(shared for shared, _ in runs), any(taken for _, taken in runs)

    check(ownership)


@compilers
def test_double_and_triple_backward(compiler):
    def higher():
        x = torch.randn(3, requires_grad=True)
        (first,) = torch.autograd.grad((x**4).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        (third,) = torch.autograd.grad(second.sum(), x)
        yield from (first, second, third)

    check(higher, compiler)


@compilers
def test_hessian_vector_product(compiler):
    def product():
        model = mlp()
        x, v = torch.randn(3, 4), torch.randn(4, 4)
        weight = model[0].weight
        (grad,) = torch.autograd.grad(model(x).pow(2).sum(), weight, create_graph=True)
        yield torch.autograd.grad((grad * v).sum(), weight)[0]
        model.zero_grad()
        model(x).sum().backward(create_graph=True)
        yield [p.grad for p in model.parameters()]

    check(product, compiler)


def test_create_graph_never_reaches_a_backend():
    def backend(graph, example_inputs):
        raise AssertionError("must not be compiled")

    x = torch.randn(3, requires_grad=True)
    with fresh(backend):
        (grad,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    torch.testing.assert_close(grad, 3 * x**2)
    assert compiled_autograd.stats().compiles == 0


@compilers
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(compiler, reentrant):
    def checkpointed():
        runs = []
        model = mlp()

        def block(x):
            runs.append(1)
            return model(x)

        x = torch.randn(3, 4, requires_grad=True)
        checkpoint(block, x, use_reentrant=reentrant).sum().backward()
        yield grads(model)
        yield x.grad
        yield len(runs)

    check(checkpointed, compiler)


def test_reentrant_passes_are_captured_too():
    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                inner = x.detach().requires_grad_()
                (inner**2).sum().backward()
            return grad * inner.grad

    def nested():
        x = torch.randn(3, requires_grad=True)
        Nested.apply(x).sum().backward()
        return x.grad

    check(nested, captures=2)


@compilers
def test_views_and_in_place(compiler):
    def changed():
        x = torch.randn(4, 4, requires_grad=True)
        base = x.clone()
        view = base[:2]
        view.mul_(3)
        base[2:, 1:].mul_(-2)
        base.t()[0].add_(x[0])
        (base * base.detach()).sum().backward()
        return x.grad

    check(changed, compiler)


def test_views_of_what_a_compiler_lays_out_in_another_way():
    linear, norm = torch.nn.Linear(32, 32), torch.nn.LayerNorm(32)
    weights = torch.rand(2, 128)

    def function():
        x = torch.ones(2, 4, 32, requires_grad=True)
        by_channels = linear(x).transpose(1, 2).contiguous().transpose(1, 2)
        (norm(by_channels).transpose(1, 2).reshape(2, -1) * weights).sum().backward()
        yield x.grad

    stats = check(function, "aot_eager", captures=1)
    assert stats.compiles == 1
    assert not stats.uncompiled_reasons


@compilers
def test_undefined_gradients(compiler):
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return None

    def undefined():
        x = torch.randn(3, requires_grad=True)
        Nothing.apply(x.exp()).sum().backward()
        yield x.grad
        (Nothing.apply(x.exp()) + x * 3).sum().backward()
        yield x.grad
        a, _ = torch.randn(6, requires_grad=True).exp().split(3)
        a.sum().backward()
        yield a.grad

    check(undefined, compiler)


def test_models_can_be_copied_and_trained_in_both_ways():
    model = mlp()
    twin = copy.deepcopy(model)
    x = torch.randn(3, 4)
    with fresh():
        model(x).sum().backward()
    twin(x).sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
