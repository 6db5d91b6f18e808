"""Hooks of every kind, against eager."""

import gc
import weakref

import pytest
import torch

import compiled_autograd
from tests.compiled_autograd.support import COMPILERS, check, fresh, grads, mlp

compilers = pytest.mark.parametrize("compiler", COMPILERS)


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
        context = fresh() if enabled else compiled_autograd.disable()
        with context, pytest.raises((RuntimeError, TypeError)) as caught:
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


def test_save_on_cpu():
    def saved():
        model = mlp()
        with torch.autograd.graph.save_on_cpu():
            out = model(torch.randn(3, 4)).sum()
        out.backward()
        return grads(model)

    check(saved)


def test_queue_callback():
    def looked_up():
        calls = []
        x = torch.randn(3, requires_grad=True)

        def hook(grad):
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(lambda: calls.append("queued by a callback")))
            engine.queue_callback(lambda: calls.append(x.grad is not None))

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
