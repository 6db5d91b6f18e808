"""The compatibility module for the custom-op API of torch 2.0 to 2.3."""

from __future__ import annotations

import collections.abc
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fake.library import legacy, register_fake
from fake.library.legacy import (
    CustomOp,
    custom_op,
    impl,
    impl_backward,
    impl_save_for_backward,
    object_custom_op,
)
from tests.fake.library.support import NAMESPACE, overload_of

NAME = f"{NAMESPACE}::foo"


@pytest.fixture(autouse=True)
def _clean():
    yield
    for name in list(CustomOp.alive):
        CustomOp.alive[name]._destroy()
    # torch leaves the names in the namespace, which torch.export looks through.
    operators = getattr(torch.ops, NAMESPACE)
    operators._dir[:] = [name for name in operators._dir if hasattr(operators, name)]


def define(prototype=None, kernel=None):
    def foo(x: Tensor) -> Tensor:
        raise NotImplementedError

    foo = prototype or foo
    foo.__name__ = "foo"
    custom_op(NAME)(foo)
    if kernel is not None:
        impl(NAME)(kernel)
    return overload_of(NAME)


def sin(x):
    return x.sin()


def with_backward(save, backward, kernel=sin, prototype=None, **options):
    op = define(prototype, kernel)
    impl_save_for_backward(NAME)(save)
    impl_backward(NAME, **options)(backward)
    return op


def test_prototype_and_impl():
    op = define(kernel=sin)
    x = torch.randn(3)
    assert torch.equal(op(x), x.sin())


def test_schema_strings():
    op = custom_op(NAME, "(Tensor? x, Tensor[] w, SymInt[] s, float? f) -> (Tensor y, Tensor z)")
    assert str(op._schema).endswith("-> (Tensor y, Tensor z)")


@pytest.mark.parametrize(
    ("schema", "error", "match"),
    [
        ("(", AssertionError, "Invalid function schema: foo"),
        ("(Tensor(a!) x) -> Tensor(a)", ValueError, "only supports functional"),
        ("(Tensor(a) x) -> Tensor(a)", ValueError, "only supports functional"),
        ("(Tensor x) -> ()", ValueError, "only supports functional"),
        ("(Tensor self) -> ()", ValueError, "self"),
        ("(Tensor self) -> Tensor", ValueError, "self"),
    ],
)
def test_refused_schemas(schema, error, match):
    with pytest.raises(error, match=match):
        custom_op(NAME, schema)


def test_names():
    with pytest.raises(ValueError, match="overload"):
        custom_op(f"{NAME}.Tensor", "() -> ()")
    with pytest.raises(ValueError, match="to have name"):
        custom_op(NAME)(sin)
    with pytest.raises(ValueError, match="namespace"):
        custom_op("foo")
    with pytest.raises(ValueError, match="is a reserved namespace"):
        custom_op("aten::foo", "(Tensor x) -> Tensor")
    with pytest.raises(ValueError, match="Could not find the operator"):
        legacy.find_op(f"{NAMESPACE}::nothing")


def test_lifetime():
    define()
    with pytest.raises(RuntimeError, match="multiple times"):
        define()
    legacy._destroy(NAME)
    define()
    with pytest.raises(RuntimeError, match="private"):
        CustomOp(None, None, None, None, None)
    with pytest.raises(RuntimeError, match="Could not find"):
        legacy._destroy(f"{NAMESPACE}::nothing")


def test_object_api():
    @object_custom_op(NAME, "(Tensor x, *, Tensor y) -> Tensor")
    def foo(x, *, y):
        raise NotImplementedError

    assert isinstance(foo, CustomOp)
    foo.impl("cpu")(lambda x, *, y: x + y)
    foo.impl_fake()(lambda x, *, y: torch.empty_like(x))
    assert torch.equal(foo(torch.ones(2), y=torch.ones(2)), torch.full((2,), 2.0))
    assert foo(torch.empty(2, device="meta"), y=torch.empty(2, device="meta")).shape == (2,)


@pytest.mark.parametrize(
    ("schema", "function", "match"),
    [
        ("(Tensor y) -> Tensor", lambda x: x, "signature to match"),
        ("(Tensor x, *, Tensor y) -> Tensor", lambda x, y: x, "signature to match"),
        ("(Tensor x, *, Tensor z, Tensor y) -> Tensor", lambda x, *, y, z: x, "signature to match"),
        ("(Tensor x) -> Tensor", lambda *args: args, "not supported"),
        ("(Tensor x) -> Tensor", lambda x=1: x, "default arguments"),
    ],
)
def test_object_api_signatures(schema, function, match):
    function.__name__ = "foo"
    with pytest.raises(ValueError, match=match):
        object_custom_op(NAME, schema)(function)


def test_factory():
    @object_custom_op(NAME)
    def foo(size: int) -> Tensor:
        raise NotImplementedError

    with pytest.raises(NotImplementedError, match="no Tensor inputs"):
        foo(3)
    foo.impl_factory()(lambda size: torch.ones(size))
    assert foo(3).shape == (3,)


def test_sequences_become_lists():
    class MySequence(collections.abc.Sequence):
        def __getitem__(self, index):
            return [1, 2, 3][index]

        def __len__(self):
            return 3

    def foo(x: Tensor, sizes: Sequence[int]) -> Tensor:
        raise NotImplementedError

    seen = []
    op = define(foo, lambda x, sizes: seen.append(sizes) or x.clone())
    op(torch.randn([]), MySequence())
    assert seen == [[1, 2, 3]]


@pytest.mark.parametrize(
    "annotation", [list[int | None], tuple[int, int], collections.abc.Callable, set[int]]
)
def test_unsupported_types(annotation):
    def foo(x, y):
        raise NotImplementedError

    foo.__annotations__ = {"x": Tensor, "y": annotation, "return": Tensor}
    with pytest.raises(ValueError, match="unsupported type"):
        custom_op(NAME)(foo)


def test_devices():
    define()
    for device in legacy.DEVICE_KEYS:
        impl(NAME, device_types=device)(sin)
    for device in ("hip", "xla", "mkldnn", ["cpu", "hip"]):
        with pytest.raises(ValueError, match="we only support device_type"):
            impl(NAME, device_types=device)(sin)


def test_missing_implementations():
    op = define()
    with pytest.raises(NotImplementedError, match="cpu impl registered"):
        op(torch.randn(3))
    with pytest.raises(NotImplementedError, match="no fake impl or Meta kernel"):
        op(torch.randn(3, device="meta"))


def test_fake_kernel():
    op = define(kernel=sin)
    legacy.impl_fake(NAME)(lambda x: x.sum())
    assert op(torch.empty(3, device="meta")).shape == ()
    assert "foo" in make_fx(op, tracing_mode="symbolic")(torch.randn(3)).code
    with pytest.raises(RuntimeError, match=r"test_legacy.py:\d+"):
        register_fake(NAME, lambda x: x, allow_override=False)


def test_existing_operators_can_be_extended():
    lib = legacy.Library(NAMESPACE, "FRAGMENT")
    lib.define("bar(Tensor x) -> Tensor")
    name = f"{NAMESPACE}::bar"
    impl(name)(lambda x: x.sin().detach())
    impl_save_for_backward(name)(lambda inputs, output: inputs.x)
    impl_backward(name)(lambda ctx, saved, grad: {"x": grad * saved.cos()})
    x = torch.randn([], requires_grad=True)
    (gx,) = torch.autograd.grad(overload_of(name)(x), x)
    torch.testing.assert_close(gx, x.cos())
    with pytest.raises(RuntimeError, match="already has"):
        impl(name)(sin)
    CustomOp.alive[name]._destroy()
    lib._destroy()


@pytest.mark.parametrize("key", ["CPU", "CompositeImplicitAutograd", "CompositeExplicitAutograd"])
def test_existing_kernels_are_respected(key):
    lib = legacy.Library(NAMESPACE, "FRAGMENT")
    lib.define("baz(Tensor x) -> Tensor")
    lib.impl("baz", sin, key)
    with pytest.raises(RuntimeError, match="already has an implementation"):
        impl(f"{NAMESPACE}::baz")(sin)
    lib._destroy()


@pytest.mark.parametrize(
    ("schema", "key", "match"),
    [
        ("(Tensor(a) x) -> Tensor(a)", None, "operator that returns views"),
        ("(Tensor(a!) x) -> Tensor", None, "non-functional"),
        ("(Tensor x) -> ()", None, "no returns"),
        ("(Tensor x) -> Tensor", "CompositeImplicitAutograd", "CompositeImplicitAutograd"),
        ("(Tensor x) -> Tensor", "Autograd", "Autograd"),
        ("(Tensor x) -> Tensor", "AutogradCPU", "AutogradCPU"),
    ],
)
def test_backward_is_refused(schema, key, match):
    lib = legacy.Library(NAMESPACE, "FRAGMENT")
    lib.define("qux" + schema)
    if key is not None:
        lib.impl("qux", sin, key)
    for register in (impl_save_for_backward, impl_backward):
        with pytest.raises(RuntimeError, match=match):
            register(f"{NAMESPACE}::qux")(lambda x: None)
    lib._destroy()


# --- backward --------------------------------------------------------------------------------------
def test_no_formula():
    op = define(kernel=sin)
    with pytest.raises(RuntimeError, match="Autograd has not been implemented"):
        op(torch.randn(3, requires_grad=True))
    with torch.no_grad():
        op(torch.randn(3, requires_grad=True))


def test_half_a_formula():
    op = define(kernel=sin)
    impl_backward(NAME)(lambda ctx, saved, grad: {"x": grad})
    with pytest.raises(RuntimeError, match="unable to find a 'save_for_backward'"):
        op(torch.randn([], requires_grad=True))


def test_inputs_are_a_named_tuple():
    seen = []

    def save(inputs, output):
        seen.append(inputs._asdict().keys())
        return {"x": inputs.x, "note": "kept"}

    op = with_backward(
        save, lambda ctx, saved, grad: {"x": grad * saved["x"].cos() * (saved["note"] == "kept")}
    )
    x = torch.randn([], requires_grad=True)
    op(x).backward()
    torch.testing.assert_close(x.grad, x.detach().cos())
    assert [list(keys) for keys in seen] == [["x"]]


def two(x: Tensor, y: Tensor) -> Tensor:
    raise NotImplementedError


def with_int(x: Tensor, dim: int) -> Tensor:
    raise NotImplementedError


def with_list(xs: Sequence[Tensor]) -> Tensor:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("prototype", "grads", "match"),
    [
        (None, lambda g: g, "to be a dict"),
        (None, lambda g: {"x": g, "y": None}, "to have keys {'x'}"),
        (None, lambda g: {"x": (g,)}, "either None or a Tensor"),
        (with_int, lambda g: {"x": g, "dim": None}, "non-Tensor-like types"),
        (two, lambda g: {"x": g}, r"to have keys {.*'y'.*}"),
        (with_list, lambda g: {"xs": [g, None]}, "3 gradients but got 2"),
        (with_list, lambda g: {"xs": [g, None, (None,)]}, "None or Tensor"),
        (with_list, lambda g: {"xs": None}, "list of gradients"),
    ],
)
def test_wrong_gradients(prototype, grads, match):
    def first(*args):
        value = args[0]
        return (value[0] if isinstance(value, list) else value).sin()

    op = with_backward(lambda inputs, output: [], lambda ctx, saved, grad: grads(grad), first, prototype)
    x = torch.randn([], requires_grad=True)
    args = {two: (x, x), with_int: (x, 1), with_list: ([x, x * 1, x * 1],)}.get(prototype, (x,))
    with pytest.raises(RuntimeError, match=match):
        op(*args).backward()


def test_gradients_of_lists():
    op = with_backward(
        lambda inputs, output: len(inputs.xs),
        lambda ctx, saved, grad: {"xs": [grad * i for i in range(saved)]},
        lambda xs: torch.stack(xs).sum(0),
        with_list,
    )
    xs = [torch.randn([], requires_grad=True) for _ in range(3)]
    op(xs).backward()
    assert [x.grad.item() for x in xs] == [0, 1, 2]


def test_output_differentiability():
    def foo(x: Tensor) -> tuple[list[Tensor], Tensor]:
        raise NotImplementedError

    op = with_backward(
        lambda inputs, output: [],
        lambda ctx, saved, grads, grad: {"x": grad},
        lambda x: ([x.clone(), x.clone()], x.clone()),
        foo,
        output_differentiability=[False, True],
    )
    [a, b], c = op(torch.randn(3, requires_grad=True))
    assert (a.requires_grad, b.requires_grad, c.requires_grad) == (False, False, True)
    for wrong in ([True], (True, False), [1, 0]):
        with pytest.raises(RuntimeError, match="list of bools"):
            impl_backward(NAME, output_differentiability=wrong)(lambda ctx, saved, grad: {})


def test_output_differentiability_of_numbers():
    def foo(x: Tensor) -> tuple[Tensor, int]:
        raise NotImplementedError

    op = with_backward(
        lambda inputs, output: [],
        lambda ctx, saved, grad0, grad1: {"x": grad0},
        lambda x: (x.clone(), 3),
        foo,
        output_differentiability=[True, True],
    )
    with pytest.raises(RuntimeError, match="is not a Tensor"):
        op(torch.randn(3, requires_grad=True))
