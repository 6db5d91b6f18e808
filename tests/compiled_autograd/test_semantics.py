"""Hooks, inputs, graphs kept or not, errors: each behaviour against eager."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import compiled_autograd
from tests.compiled_autograd.support import COMPILERS, check, fresh

compilers = pytest.mark.parametrize("compiler", COMPILERS)


def mlp() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4), torch.nn.Tanh())


def grads(model: torch.nn.Module) -> list:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


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
def test_tensor_hooks(compiler):
    def hooks():
        calls = []
        model = mlp()
        x = torch.randn(3, 4, requires_grad=True)
        model[0].weight.register_hook(lambda g: g * 2)
        model[0].weight.register_hook(lambda g: calls.append("second"))
        hidden = model[:2](x)
        hidden.register_hook(lambda g: calls.append("hidden") or g + 1)
        x.register_hook(lambda g: g.mul_(3))
        out = model[2:](hidden)
        out.register_hook(lambda g: None)
        out.sum().backward()
        yield grads(model)
        yield x.grad
        yield calls

    check(hooks, compiler)


@compilers
def test_node_hooks(compiler):
    def hooks():
        calls = []
        model = mlp()
        out = model(torch.randn(3, 4))
        node = out.grad_fn
        node.register_prehook(lambda gs: (gs[0] * 2,))
        node.register_prehook(lambda gs: calls.append(("pre", len(gs))))
        node.register_hook(lambda gi, go: (torch.sin(gi[0]) + go[0],))
        node.next_functions[0][0].register_hook(lambda gi, go: calls.append(("post", len(gi), len(go))))
        out.sum().backward()
        yield grads(model)
        yield calls

    check(hooks, compiler)


@compilers
def test_accumulator_hooks(compiler):
    def hooks():
        calls = []
        leaf = torch.randn(3, requires_grad=True)
        accumulator = torch.autograd.graph.get_gradient_edge(leaf).node
        accumulator.register_prehook(lambda gs: (gs[0] * 2,))
        accumulator.register_hook(lambda gi, go: calls.append(leaf.grad.clone()))
        leaf.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.clone()))
        leaf.exp().sum().backward()
        yield leaf.grad
        yield calls

    check(hooks, compiler)


@compilers
def test_retain_grad(compiler):
    def retained():
        x = torch.randn(3, requires_grad=True)
        y = x * 2
        y.retain_grad()
        y.register_hook(lambda g: g * 5)
        z = y.exp()
        z.retain_grad()
        z.sum().backward()
        yield from (x.grad, y.grad, z.grad)

    check(retained, compiler)


def test_retain_grad_of_a_tensor_changed_in_place():
    def retained():
        x = torch.randn(3, requires_grad=True)
        y = x * 2
        y.retain_grad()
        y.mul_(3)
        y.retain_grad()
        y.sum().backward()
        yield from (x.grad, y.grad)

    check(retained)


@compilers
def test_multi_grad_hooks(compiler):
    def hooks():
        calls = []
        tensors = [torch.randn(2, requires_grad=True) for _ in range(3)]
        torch.autograd.graph.register_multi_grad_hook(
            tensors, lambda gs: calls.append([g is None for g in gs])
        )
        torch.autograd.graph.register_multi_grad_hook(tensors, lambda g: calls.append(g.clone()), mode="any")
        (tensors[0] * tensors[2]).sum().backward()
        yield calls
        (tensors[0] * tensors[1] * tensors[2]).sum().backward()
        yield calls

    check(hooks, compiler)


@compilers
def test_optimizer_in_backward(compiler):
    def step():
        model = mlp()
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def apply(p):
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(apply)
        for _ in range(2):
            model(torch.randn(3, 4)).sum().backward()
            yield [p.detach().clone() for p in model.parameters()]

    check(step, compiler)


@pytest.mark.parametrize("where", ["tensor", "pre", "post", "accumulate"])
def test_hooks_that_raise(where):
    class Boom(Exception):
        pass

    def boom(*_):
        raise Boom("from a hook")

    x = torch.randn(3, requires_grad=True)
    y = x.exp()
    if where == "tensor":
        y.register_hook(boom)
    elif where == "pre":
        y.grad_fn.register_prehook(boom)
    elif where == "post":
        y.grad_fn.register_hook(boom)
    else:
        x.register_post_accumulate_grad_hook(boom)
    with fresh(), pytest.raises(Boom, match="from a hook"):
        y.sum().backward()
    assert compiled_autograd.stats().fallbacks == 0


@pytest.mark.parametrize(
    "register",
    [
        lambda x, y: y.register_hook(lambda g: g[:1]),
        lambda x, y: y.register_hook(lambda g: "no tensor"),
        lambda x, y: y.register_hook(lambda g: g.double()),
        lambda x, y: y.grad_fn.register_prehook(lambda gs: gs + gs),
        lambda x, y: y.grad_fn.register_prehook(lambda gs: gs[0]),
        lambda x, y: y.grad_fn.register_hook(lambda gi, go: (gi[0], gi[0])),
        lambda x, y: x.register_post_accumulate_grad_hook(lambda p: p.clone()),
    ],
)
def test_hook_results_that_eager_rejects(register):
    def message(enabled):
        x = torch.randn(3, requires_grad=True)
        y = x.exp()
        register(x, y)
        loss = y.sum()
        with pytest.raises((RuntimeError, TypeError)) as caught:
            if enabled:
                with fresh():
                    loss.backward()
            else:
                loss.backward()
        return type(caught.value), str(caught.value)

    assert message(True) == message(False)


def test_a_hook_removed_during_the_pass_is_not_called():
    def removal():
        calls = []
        x = torch.randn(3, requires_grad=True)
        y = x.exp()
        handle = x.register_hook(lambda g: calls.append("removed"))
        y.register_hook(lambda g: handle.remove())
        y.sum().backward()
        y = x.exp()
        y.sum().backward()
        return calls, x.grad

    check(removal)


def test_hooks_of_one_node_are_read_at_once():
    def removal():
        calls = []
        x = torch.randn(3, requires_grad=True)
        y = x.exp()
        handles = []
        y.grad_fn.register_prehook(lambda gs: handles[0].remove())
        handles.append(y.grad_fn.register_prehook(lambda gs: calls.append("still called")))
        y.sum().backward()
        return calls

    check(removal)


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


def test_unused_input_error_is_eagers():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with fresh(), pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(x.sum(), [x, y])


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

        x, y = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
        Give.apply(x, y).exp().sum().backward()
        shared = x.grad.data_ptr() == y.grad.data_ptr()
        return shared, Give.pointer in (x.grad.data_ptr(), y.grad.data_ptr())

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


@compilers
def test_saved_tensor_hooks(compiler):
    def packed():
        counts = {"pack": 0, "unpack": 0}

        def pack(tensor):
            counts["pack"] += 1
            return tensor.clone()

        def unpack(tensor):
            counts["unpack"] += 1
            return tensor

        model = mlp()
        x = torch.randn(3, 4)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out = model(x).exp()
        out.sum().backward()
        yield grads(model)
        yield dict(counts)

    check(packed, compiler)


def test_saved_tensor_hooks_under_create_graph_run_in_eager():
    def packed():
        x = torch.randn(3, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            y = (x**3).sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(grad.sum(), x)[0]

    check(packed, fallbacks=1)


def test_save_on_cpu():
    def saved():
        model = mlp()
        with torch.autograd.graph.save_on_cpu():
            out = model(torch.randn(3, 4)).sum()
        out.backward()
        return grads(model)

    check(saved)


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
        a, b = torch.randn(6, requires_grad=True).exp().split(3)
        a.sum().backward()
        yield a.grad

    check(undefined, compiler)


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


def test_queue_callback():
    def callbacks():
        calls = []
        engine = torch.autograd.Variable._execution_engine

        class Queue(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 1

            @staticmethod
            def backward(ctx, grad):
                engine.queue_callback(outer)
                return grad

        def outer():
            calls.append("outer")
            engine.queue_callback(lambda: calls.append(("inner", x.grad is not None)))

        x = torch.randn(3, requires_grad=True)
        Queue.apply(x).sum().backward()
        return calls

    # the engine object is looked up inside, as libraries do
    def looked_up():
        calls = []
        x = torch.randn(3, requires_grad=True)

        def hook(grad):
            torch.autograd.Variable._execution_engine.queue_callback(lambda: calls.append(x.grad is not None))

        x.register_hook(hook)
        x.exp().sum().backward()
        return calls

    check(looked_up)
    with pytest.raises(RuntimeError, match="Final callbacks can only be installed during backward pass"):
        torch.autograd.Variable._execution_engine.queue_callback(lambda: None)


def test_queries_inside_a_pass():
    def queried():
        answers = []
        x = torch.randn(3, requires_grad=True)
        y = x.exp()
        z = y.sin()
        y_node, z_node = y.grad_fn, z.grad_fn

        def hook(_):
            assert torch._C._current_graph_task_id() != -1
            node = torch._C._current_autograd_node()
            answers.append(node.name())
            answers.append([torch._C._will_engine_execute_node(n) for n in (y_node, z_node)])

        def first_hook(_):
            answers.append([n.name() for n in torch._C._current_graph_task_execution_order()])

        loss = z.sum()
        loss.register_hook(first_hook)
        y.register_hook(hook)
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        return answers

    check(queried)
    assert torch._C._current_graph_task_id() == -1
    assert torch._C._current_autograd_node() is None


def test_hooks_run_in_eagers_order():
    def order():
        calls = []

        def note(name):
            return lambda *_: calls.append(name)

        leaves = [torch.randn(3, requires_grad=True) for _ in range(6)]
        a, b = leaves[0] * leaves[1], leaves[2].exp()
        c = a + b * leaves[3]
        d = b.sin() * leaves[4]
        e = (c * d + leaves[5]).sum()
        for number, leaf in enumerate(leaves):
            leaf.register_hook(note(f"leaf {number}"))
            leaf.register_post_accumulate_grad_hook(note(f"accumulated {number}"))
        for name, tensor in {"a": a, "b": b, "c": c, "d": d, "e": e}.items():
            tensor.register_hook(note(name))
            tensor.grad_fn.register_hook(note(f"post {name}"))
        e.backward()
        return calls

    check(order)


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


def test_nested_tensors_run_in_eager():
    def nested():
        a, b = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
        stacked = torch.nested.as_nested_tensor([a, b])
        torch.nested.to_padded_tensor(stacked, 0.0).exp().sum().backward()
        return a.grad, b.grad

    stats = check(nested, captures=0, fallbacks=1)
    assert "a NestedTensor gradient" in stats.fallback_reasons


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


def test_nothing_of_a_pass_stays_alive():
    class Probe:
        pass

    def scope():
        x = torch.randn(3, requires_grad=True)
        y = x.exp()
        probe = Probe()
        y.register_hook(lambda g: probe and None)
        return y.sum(), weakref.ref(probe)

    with fresh():
        loss, probe = scope()
        loss.backward()
        del loss
        gc.collect()
        assert probe() is None


def test_models_can_be_copied_and_trained_in_both_ways():
    model = mlp()
    twin = copy.deepcopy(model)
    x = torch.randn(3, 4)
    with fresh():
        model(x).sum().backward()
    twin(x).sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
