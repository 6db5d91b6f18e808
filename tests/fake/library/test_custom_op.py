"""custom_op and CustomOpDef: defining, registering, replacing; in plain torch and in compiled code."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from fake import FakeTensorMode as FakeMode, ShapeEnv
from fake.library import EffectType, custom_op, get_ctx
from fake.library.errors import MissingContextError, RegistrationError
from tests.fake.library.support import NAMESPACE, fresh_name, numpy_sin, overload_of


def make_add(name=None, **options):
    @custom_op(name or fresh_name("add"), mutates_args=(), **options)
    def add(x: Tensor, y: float) -> Tensor:
        return torch.from_numpy(x.numpy(force=True) + y)

    return add


def test_kernels():
    add = make_add()
    x = torch.randn(3)
    assert torch.equal(add(x, 3.5), x + 3.5)
    called = []

    @add.register_kernel("cpu")
    def kernel(x, y):
        called.append(y)
        return x + y

    assert kernel(x, 1.0) is not None
    assert torch.equal(add(x, 3.5), x + 3.5)
    assert called == [1.0, 3.5]
    assert torch.equal(overload_of(add.qualname)(x, 1.0), x + 1)


def test_missing_kernel_of_a_device():
    add = make_add(device_types="cuda")
    with pytest.raises(NotImplementedError, match="CPU"):
        add(torch.randn(3), 1.0)


def test_several_device_types():
    add = make_add(device_types=("cpu", "cuda"))
    assert add(torch.zeros(1), 1.0).item() == 1.0


def test_factory_needs_a_device_argument():
    with pytest.raises(ValueError, match="`device: torch"):

        @custom_op(fresh_name(), mutates_args=(), device_types="cpu")
        def bad(size: int) -> Tensor:
            return torch.ones(size)

    @custom_op(fresh_name(), mutates_args=(), device_types="cpu")
    def ones(size: int, device: torch.device) -> Tensor:
        return torch.ones(size, device=device)

    assert ones(3, "cpu").shape == (3,)
    with pytest.raises(RuntimeError, match="register_kernel"):
        ones(3, "cuda")


@pytest.mark.parametrize("as_function", [False, True])
def test_manual_schema(as_function):
    def sin_(x):
        np.sin(x.numpy(), out=x.numpy())

    options = {"mutates_args": ["x"], "schema": "(Tensor(a!) x) -> ()"}
    name = fresh_name()
    op = custom_op(name, sin_, **options) if as_function else custom_op(name, **options)(sin_)
    x = torch.randn(3)
    expected = x.sin()
    op(x)
    torch.testing.assert_close(x, expected)


def test_default_values():
    seen = []

    @custom_op(fresh_name(), mutates_args=())
    def op(
        x: Tensor,
        a: int | None = None,
        b: float = 3.14,
        c: bool = True,
        d: int = 3,
        e: str = "foo",
        f: torch.dtype = torch.float,
        g: torch.dtype = torch.int,
    ) -> Tensor:
        seen.append([a, b, c, d, e, f, g])
        return x.clone()

    for _ in range(3):
        op(torch.randn(3))
    overload_of(op.qualname)(torch.randn(3))
    assert seen == [[None, 3.14, True, 3, "foo", torch.float, torch.int]] * 4


def test_kernel_without_the_defaults_gets_them():
    @custom_op(fresh_name(), mutates_args=())
    def op(x: Tensor, y: int = 3, *, z: float = 2.0) -> Tensor:
        return x * y * z

    @op.register_kernel("cpu")
    def _(x, y, *, z):
        return x + y + z

    for call in (op, op, overload_of(op.qualname)):
        assert call(torch.zeros(1)).item() == 5.0


def test_autograd_only_when_needed():
    op = make_add()
    calls = []
    op.register_autograd(
        lambda ctx, grad: (grad, None), setup_context=lambda ctx, inputs, output: calls.append(inputs[1])
    )
    x = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        op(x, 2.0)
    op(x.detach(), 2.0)
    assert calls == []
    assert torch.equal(op(x, 2.0), x + 2.0)
    assert calls == [2.0]


def test_gradients_of_tensor_lists():
    @custom_op(fresh_name(), mutates_args=())
    def stack(xs: list[Tensor], scale: float) -> Tensor:
        return torch.stack([x.detach() for x in xs]) * scale

    def setup_context(ctx, inputs, output):
        ctx.count, ctx.scale = len(inputs[0]), inputs[1]

    def backward(ctx, grad):
        assert ctx.needs_input_grad == ([True, False, True], False)
        return [g * ctx.scale for g in grad.unbind()], None

    stack.register_autograd(backward, setup_context=setup_context)
    xs = [torch.randn(2, requires_grad=i != 1) for i in range(3)]
    stack(xs, 3.0).sum().backward()
    assert torch.equal(xs[0].grad, torch.full((2,), 3.0))
    assert xs[1].grad is None


def test_list_outputs():
    @custom_op(fresh_name(), mutates_args=())
    def halves(x: Tensor) -> list[Tensor]:
        return [c.detach().clone() for c in x.chunk(2)]

    halves.register_autograd(lambda ctx, grads: torch.cat(grads))
    x = torch.randn(4, requires_grad=True)
    a, b = halves(x)
    assert type(halves(x.detach())) is list
    (a.sum() + 2 * b.sum()).backward()
    assert x.grad.tolist() == [1, 1, 2, 2]


def test_one_tuple_output():
    @custom_op(fresh_name(), mutates_args=())
    def op(x: Tensor) -> tuple[Tensor]:
        return (x.clone(),)

    result = op(torch.ones(2))
    assert isinstance(result, tuple)
    assert len(result) == 1


def test_not_differentiable():
    @custom_op(fresh_name(), mutates_args=(), differentiable=False)
    def bucket(x: Tensor) -> Tensor:
        return x.detach().floor()

    bucket.register_fake(torch.empty_like)
    x = torch.randn(3, requires_grad=True)
    for call in (bucket, bucket, overload_of(bucket.qualname)):
        assert not call(x).requires_grad
    (bucket(x) * x).sum().backward()
    assert torch.equal(x.grad, x.detach().floor())
    with pytest.raises(RegistrationError, match="differentiable=False"):
        bucket.register_autograd(lambda ctx, grad: grad)
    compiled = torch.compile(lambda x: bucket(x) * x, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), bucket(x) * x)


def test_fake_kernel():
    op = make_add()
    with FakeTensorMode(), pytest.raises(RuntimeError, match="no fake impl"):
        op(torch.randn(3), 1.0)
    called = []

    @op.register_fake
    def fake(x, y):
        called.append(y)
        return torch.empty_like(x)

    with FakeTensorMode():
        assert op(torch.randn(3), 1.0).shape == (3,)
    assert op(torch.empty(4, device="meta"), 1.0).shape == (4,)
    assert called == [1.0, 1.0]
    assert fake(torch.ones(2), 0.0).shape == (2,)


def test_data_dependent_sizes():
    @custom_op(fresh_name(), mutates_args=())
    def positive(x: Tensor) -> Tensor:
        return x[x > 0]

    @positive.register_fake
    def _(x):
        ctx = get_ctx()
        size = ctx.new_dynamic_size(min=1, max=100)
        with pytest.raises(ValueError, match="greater than or equal to 0"):
            ctx.new_dynamic_size(min=-1)
        return x.new_empty(size)

    graph = make_fx(positive, tracing_mode="symbolic")(torch.randn(10) + 5)
    assert positive.qualname.split("::")[1] in graph.code
    with pytest.raises(RuntimeError, match="data-dependent"):
        positive(torch.empty(3, device="meta"))
    with pytest.raises(MissingContextError, match="inside a fake kernel"):
        get_ctx()


def test_each_thread_has_the_context_of_its_own_kernel():
    meet = threading.Barrier(2, timeout=60)

    @custom_op(fresh_name(), mutates_args=())
    def chosen(x: Tensor, waits: bool) -> Tensor:
        return x[x > 0]

    @chosen.register_fake
    def _(x, waits):
        meet.wait()  # both run now
        size = get_ctx().new_dynamic_size()
        meet.wait()
        if waits:
            meet.wait()  # the other one has left first, although it came last
            size = get_ctx().new_dynamic_size()
        return x.new_empty(size)

    found = {}

    def work(waits):
        with FakeMode(shape_env=ShapeEnv()) as mode:
            found[waits] = (mode.shape_env, chosen(torch.empty(3), waits).shape[0].node.shape_env)
        if not waits:
            meet.wait()

    threads = [threading.Thread(target=work, args=(waits,)) for waits in (False, True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {False, True}
    assert all(own is used for own, used in found.values())
    with pytest.raises(MissingContextError):
        get_ctx()


def test_compile_and_export():
    op = numpy_sin()
    x = torch.randn(3, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: op(x * 2) + 1, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), op(x * 2) + 1)
    (grad,) = torch.autograd.grad(compiled(x).sum(), x)
    torch.testing.assert_close(grad, 2 * (2 * x).cos())

    class Module(torch.nn.Module):
        def forward(self, x):
            return op(x)

    exported = torch.export.export(Module(), (x.detach(),))
    assert op.qualname.split("::")[1] in exported.graph_module.code
    torch.testing.assert_close(exported.module()(x.detach()), x.detach().sin())


def test_compile_with_graph_break_around():
    op = numpy_sin()

    def f(x):
        y = op(x)
        torch._dynamo.graph_break()
        return op(y)

    x = torch.randn(3)
    torch.testing.assert_close(torch.compile(f, backend="eager")(x), f(x))


def test_compiled_mutation():
    @custom_op(fresh_name(), mutates_args=("out",))
    def sin_into(x: Tensor, out: Tensor) -> None:
        np.sin(x.numpy(), out=out.numpy())

    def f(x):
        out = torch.zeros_like(x)
        sin_into(x, out)
        return out * 2

    x = torch.randn(3)
    torch.testing.assert_close(torch.compile(f, backend="aot_eager", fullgraph=True)(x), x.sin() * 2)


def test_vmap():
    op = numpy_sin()
    x = torch.randn(2, 3)

    @op.register_vmap
    def _(info, in_dims, x):
        assert info.batch_size == 2
        return op(x), in_dims[0]

    torch.testing.assert_close(torch.vmap(op)(x), x.sin())
    op.register_vmap(lambda info, in_dims, x: (op(x) * 0, in_dims[0]))
    assert torch.vmap(op)(x).abs().sum() == 0


def test_torch_dispatch_rules():
    op = numpy_sin()

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    @op.register_torch_dispatch(Mode)
    def _(mode, func, types, args, kwargs):
        return func(*args) * 0

    with Mode():
        assert op(torch.ones(3)).sum() == 0
    op.register_torch_dispatch(Mode, lambda mode, func, types, args, kwargs: func(*args) * 2)
    with Mode():
        torch.testing.assert_close(op(torch.ones(3)), 2 * torch.ones(3).sin())


def test_autocast():
    op = make_add()
    op.register_autocast("cpu", torch.bfloat16)
    op.register_kernel("cpu", lambda x, y: x + y)
    with torch.autocast("cpu"):
        assert op(torch.ones(2), 1.0).dtype == torch.bfloat16
    assert op(torch.ones(2), 1.0).dtype == torch.float32
    with pytest.raises((RuntimeError, ValueError), match="device type"):
        op.register_autocast("nothing", torch.float16)
    with pytest.raises(ValueError, match="str"):
        op.register_autocast(3, torch.float16)


def test_effect():
    op = make_add()
    op.register_effect(EffectType.ORDERED)
    assert torch._library.simple_registry.singleton.find(op.qualname).effect.effect is EffectType.ORDERED
    op.register_effect(None)


def test_tags():
    op = make_add(tags=(torch.Tag.pointwise,))
    assert torch.Tag.pointwise in op.overload.tags
    assert torch.Tag.pt2_compliant_tag in op.overload.tags


def test_overloads():
    name = fresh_name("over")
    first = custom_op(name, lambda x: x.clone(), mutates_args=(), schema="(Tensor x) -> Tensor")
    second = custom_op(
        f"{name}.two", lambda x, y: x + y, mutates_args=(), schema="(Tensor x, Tensor y) -> Tensor"
    )
    packet = getattr(getattr(torch.ops, NAMESPACE), name.split("::")[1])
    x = torch.ones(2)
    assert torch.equal(packet(x), first(x))
    assert torch.equal(packet(x, x), second(x, x))


def test_mutates_unknown():
    @custom_op(fresh_name(), mutates_args="unknown")
    def op(x: Tensor, ys: list[Tensor], n: int) -> None:
        x.add_(n)

    assert "Tensor(a0!) x, Tensor(a1!)[] ys" in str(op.schema)
    x, y = torch.zeros(1), torch.zeros(1)
    before = x._version, y._version
    op(x, [y], 3)
    assert x.item() == 3
    assert x._version > before[0]
    assert y._version > before[1]


@pytest.mark.skipif(not hasattr(torch.Tag, "inplace"), reason="this torch has no inplace tag")
def test_inplace_and_out_tags():
    @custom_op(fresh_name("sin_"), mutates_args={"x"}, tags=torch.Tag.inplace)
    def sin_(x: Tensor) -> Tensor:
        np.sin(x.numpy(), out=x.numpy())
        return x

    @custom_op(fresh_name("sin_out"), mutates_args={"out"}, tags=torch.Tag.out)
    def sin_out(x: Tensor, *, out: Tensor) -> Tensor:
        np.sin(x.numpy(), out=out.numpy())
        return out

    x = torch.randn(3)
    expected = x.sin()
    out = torch.empty(3)
    assert sin_out(x, out=out) is out
    assert sin_(x) is x
    torch.testing.assert_close(x, expected)
    torch.testing.assert_close(out, expected)


def test_source_of_the_fake_kernel():
    op = numpy_sin()
    registered = torch._library.simple_registry.singleton.find(op.qualname).fake_impl.kernel
    assert "support.py" in registered.source
    op.register_fake(lambda x: torch.empty_like(x))
    assert registered.source.split(":")[0] == __file__
