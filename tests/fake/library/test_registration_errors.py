"""Everything that is registered wrong is refused when it is registered, with the name of what is wrong."""

from __future__ import annotations

import collections
import typing

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fake.library import Library, custom_op, define, impl, infer_schema, register_autograd, register_fake
from fake.library.errors import (
    DuplicateOpError,
    FakeKernelError,
    ReservedNamespaceError,
    SchemaError,
    SignatureError,
    SignatureWarning,
    UnknownOpError,
    UnsupportedAnnotationError,
)
from fake.library.schema import RESERVED_NAMESPACES, supported_annotations
from tests.fake.library.support import NAMESPACE, fresh_name


def make():
    @custom_op(fresh_name(), mutates_args=())
    def op(x: Tensor, y: int = 3, *, mode: str = "a") -> Tensor:
        return x.clone()

    return op


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda x: x, "it takes 1 positional arguments, the schema passes 2"),
        (lambda: None, "it takes 0 positional arguments"),
        (lambda x, y, z: x, "parameter 'z' is not an argument"),
        (lambda y, x, *, mode: x, "parameter 'y' stands where the schema has 'x'"),
        (lambda a, y, *, mode: a, "parameter 'a' stands where the schema has 'x'"),
        (lambda x, *, y, mode: x, "parameter 'y' is keyword-only, the schema passes it by position"),
        (lambda x, y: x, "it has no keyword-only parameter 'mode'"),
        (lambda x, y, *, mode, other: x, "keyword-only parameter 'other' is not an argument"),
        (lambda x, y=4, *, mode="a": x, "the default of 'y' is 4, the schema says 3"),
        (lambda x, y=3, *, mode="b": x, "the default of 'mode' is 'b', the schema says 'a'"),
        (lambda x=None, y=3, *, mode="a": x, "parameter 'x' has a default, the schema has none"),
    ],
)
@pytest.mark.parametrize("role", ["kernel", "fake kernel"])
def test_kernel_signatures(function, problem, role):
    op = make()
    register = op.register_fake if role == "fake kernel" else op.register_kernel("cpu")
    with pytest.raises(SignatureError) as caught:
        register(function)
    error = caught.value
    assert isinstance(error, ValueError)
    assert f"{op.qualname}: the {role} does not fit the operator: {problem}" in str(error)
    assert (error.op, error.role) == (op.qualname, role)
    assert error.expected == "(x, y=3, *, mode='a')"
    assert op(torch.ones(1)).item() == 1  # nothing was registered


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, *, mode: x.clone(),
        lambda x, y=3, *, mode="a": x.clone(),
        lambda x, y, mode: x.clone(),
        lambda *args, **kwargs: args[0].clone(),
        lambda _x, _y, **_: _x.clone(),
        lambda x, /, y, *, mode, extra=None: x.clone(),
    ],
)
def test_accepted_signatures(function):
    op = make()
    op.register_kernel("cpu", function)
    op.register_fake(function)
    op(torch.ones(1))
    op(torch.ones(1), 4, mode="b")


@pytest.mark.parametrize(
    ("setup", "problem"),
    [
        (lambda ctx, inputs, output: None, "called with keyword_only_inputs=..., which it does not take"),
        (lambda ctx, inp, keyword_only_inputs, output: None, "called with inputs="),
        (lambda ctx, inputs, keyword_only_inputs, output, more: None, "parameter 'more' is never passed"),
    ],
)
def test_setup_context_signatures(setup, problem):
    op = make()
    with pytest.raises(SignatureError, match=problem):
        op.register_autograd(lambda ctx, grad: (grad, None), setup_context=setup)
    assert op._backward_fn is None
    op.register_autograd(lambda ctx, grad: (grad, None), setup_context=lambda **everything: None)


@pytest.mark.parametrize(
    "backward", [lambda ctx: None, lambda ctx, a, b: None, lambda ctx, grad, *, more: None]
)
def test_backward_signatures(backward):
    with pytest.raises(SignatureError, match="backward formula"):
        make().register_autograd(backward)


def test_backward_gets_one_gradient_an_output():
    @custom_op(fresh_name(), mutates_args=())
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.clone(), x.clone()

    with pytest.raises(SignatureError) as caught:
        op.register_autograd(lambda ctx, grad: grad)
    assert caught.value.expected == "(ctx, grad0, grad1)"
    op.register_autograd(lambda ctx, *grads: grads[0])


def test_vmap_and_dispatch_signatures():
    op = make()
    with pytest.raises(SignatureError, match="vmap rule"):
        op.register_vmap(lambda x, y: (x, 0))
    with pytest.raises(SignatureError, match="torch_dispatch rule"):
        op.register_torch_dispatch(FakeTensorMode, lambda func, args: None)
    op.register_vmap(lambda info, in_dims, x, y, *, mode: (x, 0))


def test_non_functional_operators_have_no_formula():
    @custom_op(fresh_name(), mutates_args=("x",))
    def op(x: Tensor) -> None:
        x.zero_()

    with pytest.raises(RuntimeError, match="non-functional"):
        op.register_autograd(lambda ctx: None)


# --- what fake kernels return ----------------------------------------------------------------------
CAPTURED = torch.ones(3)


@pytest.mark.parametrize(
    ("fake", "problem"),
    [
        (lambda x: CAPTURED, "is a real tensor"),
        (lambda x: (x.new_empty(1), x.new_empty(1)), "returned 2 outputs, the schema has 3"),
        (lambda x: x, "returned 1 outputs, the schema has 3"),
    ],
)
def test_fake_kernel_results(fake, problem):
    returns = Tensor if "real" in problem else tuple[Tensor, Tensor, Tensor]

    def kernel(x):
        return x.clone()

    kernel.__annotations__ = {"x": Tensor, "return": returns}
    op = custom_op(fresh_name(), kernel, mutates_args=())
    op.register_fake(fake)
    with FakeTensorMode(), pytest.raises(FakeKernelError, match=problem):
        op(torch.ones(3))
    with pytest.raises(FakeKernelError, match=problem):
        op(torch.empty(3, device="meta"))


# --- names, schemas, annotations -------------------------------------------------------------------
@pytest.mark.parametrize("namespace", sorted(RESERVED_NAMESPACES))
def test_reserved_namespaces(namespace):
    with pytest.raises(ReservedNamespaceError, match="is a reserved namespace"):
        custom_op(f"{namespace}::foo", lambda x: x, mutates_args=(), schema="(Tensor x) -> Tensor")
    with pytest.raises(ValueError, match="is a reserved namespace"):
        Library("prim", "DEF")


@pytest.mark.parametrize("name", ["foo", "a::b::c", "::foo", "ns::"])
def test_bad_names(name):
    with pytest.raises(SchemaError, match="namespace"):
        custom_op(name, lambda x: x, mutates_args=(), schema="(Tensor x) -> Tensor")


def test_bad_schemas():
    with pytest.raises(SchemaError, match="invalid schema"):
        custom_op(fresh_name(), lambda x: x, mutates_args=(), schema="(")
    with pytest.raises(SchemaError, match=r"the op mutates {'x'}"):
        custom_op(fresh_name(), lambda x: None, mutates_args=(), schema="(Tensor(a!) x) -> ()")
    with pytest.raises(SignatureError, match="'y' stands where the schema has 'x'"):
        custom_op(fresh_name(), lambda y: y, mutates_args=(), schema="(Tensor x) -> Tensor")


def test_mutates_args():
    def fn(x: Tensor, n: int) -> None: ...

    for argument, problem in (
        ({"y"}, r"{'y'} in mutates_args were not found"),
        ({"n"}, "only Tensors or collections of Tensors can be mutated"),
        ("x", "sequence of the names"),
    ):
        with pytest.raises(ValueError, match=problem):
            custom_op(fresh_name(), fn, mutates_args=argument)


def test_keyword_only_tensors():
    def fn(x: Tensor, *, y: int, z: Tensor) -> Tensor: ...

    with pytest.raises(NotImplementedError, match="kwarg-only Tensor args"):
        custom_op(fresh_name(), fn, mutates_args=())
    name = fresh_name()
    define(name, "(Tensor x, *, Tensor y) -> Tensor")
    with pytest.raises(NotImplementedError, match="kwarg-only Tensor args"):
        register_autograd(
            name, lambda grad: grad, setup_context=lambda ctx, inputs, keyword_only_inputs, output: None
        )


Point = collections.namedtuple("Point", ["x", "y"])


@pytest.mark.parametrize(
    "annotation",
    [list[int | None], typing.Callable, Point, dict[str, int], set[int], tuple[int, int], tuple[int, float]],
    ids=str,
)
def test_unsupported_parameters(annotation):
    def fn(x, y):
        return x

    fn.__annotations__ = {"x": Tensor, "y": annotation, "return": Tensor}
    with pytest.raises(UnsupportedAnnotationError, match="unsupported type") as caught:
        custom_op(fresh_name(), fn, mutates_args=())
    assert "Parameter y" in str(caught.value)
    assert set(supported_annotations()) <= set(caught.value.supported)


def test_tuple_suggests_a_list():
    def fn(x: Tensor, y: tuple[int, int]) -> Tensor: ...

    with pytest.raises(ValueError, match=r"For example, (list|typing\.List)\[int\]"):
        custom_op(fresh_name(), fn, mutates_args=())


def test_missing_annotations():
    def no_return(x: Tensor): ...

    def no_parameter(x) -> Tensor: ...

    def variadic(*args: Tensor) -> Tensor: ...

    for fn, problem in (
        (no_return, "No return type annotation"),
        (no_parameter, "must have a type annotation"),
        (variadic, "varargs"),
    ):
        with pytest.raises(ValueError, match=problem):
            custom_op(fresh_name(), fn, mutates_args=())
        with pytest.raises(ValueError, match=problem):
            infer_schema(fn, mutates_args=())


def test_infer_schema():
    def fn(
        x: Tensor,
        y: int,
        b: torch.dtype,
        c: torch.device,
        d: torch.types.Number,
        w: list[Tensor | None],
        s: str = "a",
    ) -> tuple[Tensor, int]: ...

    expected = 'SymInt y, ScalarType b, Device c, Scalar d, Tensor?[] w, str s="a") -> (Tensor, SymInt)'
    assert infer_schema(fn, mutates_args=()) == f"(Tensor x, {expected}"
    assert infer_schema(fn, mutates_args={"x"}, op_name="f") == f"f(Tensor(a0!) x, {expected}"


# --- operators that others defined -----------------------------------------------------------------
def test_duplicates():
    name = fresh_name()
    define(name, "(Tensor x) -> Tensor")
    with pytest.raises(DuplicateOpError):
        define(name, "(Tensor x) -> Tensor")
    with pytest.raises(DuplicateOpError, match="cannot replace"):
        custom_op(name, lambda x: x, mutates_args=(), schema="(Tensor x) -> Tensor")


def test_kernels_of_foreign_operators():
    name = fresh_name()
    define(name, "(Tensor x, int n) -> Tensor")
    with pytest.raises(SignatureError, match="takes 1 positional"):
        register_fake(name, lambda x: x)
    with pytest.raises(SignatureError, match="takes 1 positional"):
        impl(name, "cpu", lambda x: x)
    with pytest.raises(SignatureError, match="'n' stands where the schema has 'x'"):
        impl(name, "cpu", lambda n, x: x)
    with pytest.warns(SignatureWarning, match="'count' of the fake kernel is called 'n'"):
        register_fake(name, lambda x, count: x.new_empty(count))
    with pytest.raises(SignatureError, match="backward formula"):
        register_autograd(name, lambda ctx: None)


@pytest.mark.parametrize("op", [torch.sin, 3, None])
def test_not_an_operator(op):
    with pytest.raises(UnknownOpError, match="unexpected type for op"):
        register_fake(op, lambda x: x)


def test_define_validation():
    with pytest.raises(ValueError, match="namespace"):
        define("foo", "(Tensor x) -> Tensor")
    with pytest.raises(ValueError, match="expected schema to look like"):
        define(fresh_name(), "foo(Tensor x) -> Tensor")
    with pytest.raises(RuntimeError, match="Expected one of cpu, cuda"):
        impl("blah::blah", "somethingsomething")
    with pytest.raises(RuntimeError, match="unknown type specifier"):
        define(fresh_name(), "(asdf a) -> Tensor")
    with pytest.raises(ValueError, match="Unsupported kind"):
        Library(NAMESPACE, "WHAT")
