"""opcheck: correct operators pass, each planted fault is found by the check that is for it."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing._internal import custom_op_db

from fake.library import custom_op, get_ctx, opcheck, scoped_library
from fake.library.errors import OpCheckError
from fake.library.opcheck import ALL_TEST_UTILS, CheckFailure
from tests.fake.library.support import NAMESPACE, fresh_name, numpy_sin, overload_of

FOUR = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def failures(op, args, **options):
    return {f.check: f for f in opcheck(op, args, raise_exception=False, **options).failures}


@pytest.mark.parametrize("grad", [False, True])
def test_correct_operator_passes(grad):
    op = numpy_sin()
    verdict = opcheck(op, (torch.randn(3, 4, requires_grad=grad),))
    assert verdict == dict.fromkeys(FOUR, "SUCCESS")
    assert verdict.ok
    assert "all checks passed" in str(verdict)
    assert (
        opcheck(op, (torch.randn(3, 4, requires_grad=grad),), test_utils="ALL").keys()
        == ALL_TEST_UTILS.keys()
    )


def test_builtin_operator():
    x = torch.randn(3, requires_grad=True)
    assert opcheck(torch.ops.aten.sin.default, (x,)) == dict.fromkeys(FOUR, "SUCCESS")
    assert opcheck(torch.ops.aten.sin.default, (x,), test_utils="test_schema") == {"test_schema": "SUCCESS"}
    two = ["test_schema", "test_faketensor"]
    assert opcheck(torch.ops.aten.sin.default, (x,), test_utils=two) == dict.fromkeys(two, "SUCCESS")


@pytest.mark.parametrize("op_info", custom_op_db.custom_op_db, ids=lambda info: info.name)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_custom_op_db(op_info):
    sample = next(iter(op_info.sample_inputs("cpu", torch.float32, requires_grad=op_info.supports_autograd)))
    assert opcheck(op_info.op, [sample.input, *sample.args], sample.kwargs).ok


def test_bad_calls_of_opcheck():
    x = torch.randn(3)
    with pytest.raises(ValueError, match="OpOverload"):
        opcheck(torch.sin, (x,))
    with pytest.raises(ValueError, match="test_utils to be subset of"):
        opcheck(torch.ops.aten.sin.default, (x,), test_utils="blah")
    with pytest.raises(ValueError, match="both"):
        opcheck(torch.ops.aten.sin.default, (x,), rtol=1.0)
    with pytest.raises(RuntimeError, match="overloads"):
        opcheck(torch.ops.aten.add, (x, x))
    for sample in (x, None, "x", {"x": x}):
        with pytest.raises(TypeError, match=r"opcheck\(aten::sin, ...\): args is a .*\(x,\)"):
            opcheck(torch.ops.aten.sin.default, sample)
    with pytest.raises(TypeError, match="kwargs is a Tensor"):
        opcheck(torch.ops.aten.sin.default, (x,), x)


# --- faults that torch's own checks find -----------------------------------------------------------
def autograd_op(lib, schema, kernel, meta=None, backward=lambda ctx, grad: grad, dirty=False):
    """An operator by hand: schema, kernel, Meta kernel and an autograd.Function."""
    name = fresh_name().split("::")[1]
    lib.define(name + schema)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    exclude = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if dirty:
                ctx.mark_dirty(x)
            with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(exclude):
                return op(x)

    Function.backward = staticmethod(backward)
    lib.impl(name, Function.apply, "Autograd")
    lib.impl(name, kernel, "CPU")
    if meta is not None:
        lib.impl(name, meta, "Meta")
    return op


@pytest.fixture
def lib():
    with scoped_library(NAMESPACE, "FRAGMENT") as library:
        yield library


def test_hidden_mutation(lib):
    def kernel(x):
        x.sin_()
        return x.clone()

    op = autograd_op(lib, "(Tensor x) -> Tensor", kernel)
    with pytest.raises(OpCheckError, match="Argument x is not defined as mutable but was mutated") as caught:
        opcheck(op, (torch.tensor(1.0, requires_grad=True),), {})
    assert caught.value.check == "test_schema"
    assert caught.value.evidence[0].where == "argument x"
    assert "mutates_args" in caught.value.fix


def test_hidden_view(lib):
    op = autograd_op(lib, "(Tensor x) -> Tensor", lambda x: x.view_as(x), lambda x: x.view_as(x))
    with pytest.raises(OpCheckError, match="Argument x is not defined to alias output but was aliasing"):
        opcheck(op, (torch.tensor(1.0, requires_grad=True),), {})


def test_missing_fake_kernel(lib):
    op = autograd_op(lib, "(Tensor x) -> Tensor", lambda x: torch.tensor(x.detach().numpy() ** 2))
    with pytest.raises(OpCheckError, match=str(op)) as caught:
        opcheck(op, (torch.tensor([0.0, 1.0], requires_grad=True),), {})
    assert "register_fake" in caught.value.fix


def test_wrong_fake_kernel(lib):
    op = autograd_op(lib, "(Tensor x) -> Tensor", lambda x: x**2, lambda x: x.unsqueeze(1) ** 2)
    with pytest.raises(OpCheckError, match=r"Shapes .* are not equal") as caught:
        opcheck(op, (torch.tensor([0.0, 1.0], requires_grad=True),), {})
    (evidence,) = caught.value.evidence
    assert (evidence.where, evidence.expected[:10], evidence.actual[:13]) == (
        "output 0",
        "float32[2]",
        "float32[2, 1]",
    )


def test_output_that_aliases_cannot_be_functionalized(lib):
    op = autograd_op(lib, "(Tensor(a!) x) -> Tensor(a!)", lambda x: x.sin_(), lambda x: x, dirty=True)
    with pytest.raises(OpCheckError, match="outputs do not have alias annotations"):
        opcheck(op, (torch.tensor([0.0, 1.0]),), {})


def test_autograd_below_the_dispatcher(lib):
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * 0.5

    lib.define("below(Tensor x) -> Tensor")
    lib.impl("below", Function.apply, "CPU")
    lib.impl("below", lambda x: x.clone(), "Meta")
    with pytest.raises(OpCheckError, match="does not have an autograd kernel"):
        opcheck(overload_of(f"{NAMESPACE}::below"), (torch.randn([], requires_grad=True),), {})


def test_global_state(lib):
    calls = 0

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            nonlocal calls
            calls += 1
            return x.clone() * calls

        @staticmethod
        def backward(ctx, grad):
            return grad

    lib.define("stateful(Tensor x) -> Tensor")
    lib.impl("stateful", Function.apply, "CompositeImplicitAutograd")
    op = overload_of(f"{NAMESPACE}::stateful")
    x = torch.tensor(1.0, requires_grad=True)
    with pytest.raises(OpCheckError, match="eager-mode PyTorch vs AOT") as caught:
        opcheck(op, (x,), {})
    assert "Absolute difference:" in str(caught.value.__context__.__context__)
    opcheck(op, (x,), {}, test_utils="test_aot_dispatch_dynamic", atol=3, rtol=0.01)


def test_results_without_exception(lib):
    lib.define("alias(Tensor x) -> Tensor")
    lib.impl("alias", lambda x: x[:], "CompositeExplicitAutograd")
    op = overload_of(f"{NAMESPACE}::alias")
    # torch makes aliasing outputs an error of AOTAutograd where the environment says CI, a warning elsewhere.
    with torch._functorch.config.patch(error_on_custom_op_aliasing=False):
        with pytest.raises(OpCheckError, match="is not defined to alias output"):
            opcheck(op, (torch.randn(3),))
        verdict = opcheck(op, (torch.randn(3),), raise_exception=False)
    text = str(verdict)
    failure = verdict.pop("test_schema")
    assert isinstance(failure, RuntimeError)
    assert isinstance(failure, CheckFailure)
    assert verdict == dict.fromkeys(FOUR[1:], "SUCCESS")
    assert "FAIL  test_schema" in text
    assert "fix: return a clone" in text


# --- faults that need more -------------------------------------------------------------------------
def with_fake(kernel, fake, mutates_args=()):
    op = custom_op(fresh_name(), kernel, mutates_args=mutates_args)
    op.register_fake(fake)
    return op


def double(x: Tensor) -> Tensor:
    return x.contiguous() * 2


def transpose(x: Tensor) -> Tensor:
    return x.t().contiguous().t() * 1


@pytest.mark.parametrize(
    ("fake", "sample", "label"),
    [
        (lambda x: x.new_empty(3, 4), (3, 4), "all sizes larger"),
        (lambda x: torch.empty_like(x), (3, 4), "column-major"),
        (lambda x: x.new_empty(x.shape, dtype=torch.float32), (3, 4), "float64"),
        (lambda x: x.new_empty(x.shape) if x.numel() else x.new_empty(0), (3, 4), "→ 0"),
        (lambda x: x.new_empty(x.shape) if 1 not in x.shape else x.new_empty(1, 1), (3, 4), "→ 1"),
        (
            lambda x: x.new_empty(x.shape).t().contiguous().t() if x.shape[0] > 5 else x.new_empty(x.shape),
            (3, 4),
            "si",
        ),
    ],
    ids=["constant size", "stride", "dtype", "empty", "size 1", "stride at other sizes"],
)
def test_fake_kernel_right_only_for_the_sample(fake, sample, label):
    op = with_fake(double, fake)
    found = failures(op, (torch.randn(sample),))
    assert found.keys() == {"test_fake_variations"}
    assert label in found["test_fake_variations"].problem
    with pytest.raises(CheckFailure, match="right for the sample but wrong with"):
        opcheck(op, (torch.randn(sample),))


def test_integers_stay_within_sizes_that_shrink():
    """A kernel need not check offsets: one beyond the end may end the process."""
    seen = []

    def sums(x: Tensor, offsets: Tensor) -> Tensor:
        seen.append((len(x), int(offsets.max()) if offsets.numel() else 0))
        ends = offsets.tolist()
        return torch.stack([x[a:b].sum(0) for a, b in itertools.pairwise(ends)])

    op = with_fake(sums, lambda x, offsets: x.new_empty(len(offsets) - 1, *x.shape[1:]))
    assert opcheck(op, (torch.randn(6, 3), torch.tensor([0, 2, 3, 6]))).ok
    assert {0, 1, 6, 11} <= {rows for rows, _ in seen}
    assert all(last <= rows for rows, last in seen)


def test_wrong_stride_on_the_sample():
    op = with_fake(transpose, lambda x: torch.empty(x.shape))
    failure = failures(op, (torch.randn(3, 4),))["test_faketensor"]
    assert "stride (1, 3)" in failure.evidence[0].expected
    assert "stride (4, 1)" in failure.evidence[0].actual


def test_data_dependent_size_passed_as_static():
    def kernel(x: Tensor) -> Tensor:
        return x[x > 0]

    op = with_fake(kernel, lambda x: x.new_empty(x.shape))
    failure = failures(op, (torch.tensor([1.0, 2.0, 3.0]),))["test_fake_variations"]
    assert "values" in failure.problem
    assert "new_dynamic_size" in failure.fix

    honest = with_fake(kernel, lambda x: x.new_empty(get_ctx().new_dynamic_size()))
    assert opcheck(honest, (torch.tensor([1.0, 2.0, 3.0]),)).ok


def test_uninitialised_memory():
    def kernel(x: Tensor) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        out[1:] = x[1:]
        return out

    op = with_fake(kernel, lambda x: x.new_empty(x.shape))
    failure = failures(op, (torch.randn(4),), test_utils="test_uninitialized_memory")[
        "test_uninitialized_memory"
    ]
    assert "1 of 4 elements differ" in failure.evidence[0].actual

    def written(x: Tensor) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        out.copy_(x)
        return out

    assert opcheck(with_fake(written, lambda x: x.new_empty(x.shape)), (torch.randn(4),), test_utils="ALL").ok


def backward_for(kind):
    def backward(ctx, grad):
        if kind == "assumes contiguous":
            # Reads the gradient's memory in order, as a CUDA kernel without stride arguments does.
            flat = torch.as_strided(grad, (grad.untyped_storage().nbytes() // 4,), (1,), 0)
            needed = grad.numel()
            flat = flat.repeat(-(-needed // len(flat)))[:needed] if len(flat) < needed else flat[:needed]
            return flat.reshape(grad.shape) * 2
        return grad * 2

    return backward


@pytest.mark.parametrize("kind", ["assumes contiguous", "right"])
def test_backward_wrong_for_other_layouts(kind):
    def kernel(x: Tensor) -> Tensor:
        return x.detach().contiguous() * 2

    op = with_fake(kernel, lambda x: x.new_empty(x.shape))
    op.register_autograd(backward_for(kind))
    found = failures(op, (torch.randn(3, 4, requires_grad=True),), test_utils="test_gradients")
    if kind == "right":
        assert not found
        return
    assert "transposed gradient" in found["test_gradients"].problem
    assert "contiguous" in found["test_gradients"].fix


def test_backward_wrong_for_expanded_gradients():
    def kernel(x: Tensor) -> Tensor:
        return x.detach().contiguous() * 2

    def backward(ctx, grad):
        return grad * 2 if grad.stride(-1) != 0 else grad

    op = with_fake(kernel, lambda x: x.new_empty(x.shape))
    op.register_autograd(backward)
    failure = failures(op, (torch.randn(3, 4, requires_grad=True),), test_utils="test_gradients")[
        "test_gradients"
    ]
    assert "expanded" in failure.problem


def test_mutating_operator_is_functionalized():
    def kernel(x: Tensor, out: Tensor) -> None:
        np.sin(x.numpy(), out=out.numpy())

    op = custom_op(fresh_name(), kernel, mutates_args=("out",))
    assert opcheck(op, (torch.randn(3), torch.empty(3)), test_utils="ALL").ok


def test_undeclared_mutation_of_one_argument():
    def kernel(x: Tensor, out: Tensor) -> None:
        out.copy_(x)
        x.zero_()

    op = custom_op(fresh_name(), kernel, mutates_args=("out",))
    failure = failures(op, (torch.randn(3), torch.empty(3)))["test_schema"]
    assert [e.where for e in failure.evidence] == ["argument x"]


def test_operator_of_torch_library_is_lenient_unless_strict():
    op = torch.library.custom_op(fresh_name(), double, mutates_args=())
    op.register_fake(torch.empty_like)
    assert opcheck(op, (torch.randn(3, 4),)).ok
    assert not opcheck(op, (torch.randn(3, 4),), strict=True, raise_exception=False).ok


def test_unbacked_stride():
    @custom_op(fresh_name(), mutates_args=[])
    def op(x: Tensor) -> Tensor:
        return x.new_zeros((x.size(0), 18))

    @op.register_fake
    def _(x):
        return torch.empty(x.shape[0], get_ctx().new_dynamic_size(), device=x.device, dtype=x.dtype)

    opcheck(op, args=[torch.zeros([10, 20])])


@pytest.mark.slow
def test_needs_no_test_dependencies():
    code = (
        "import torch, sys; from fake.library import opcheck;"
        "opcheck(torch.ops.aten.sin.default, (torch.randn(3, requires_grad=True),));"
        "assert 'expecttest' not in sys.modules;"
        "assert 'torch.testing._internal.common_utils' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
