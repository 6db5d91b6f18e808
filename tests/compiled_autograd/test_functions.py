"""Custom Functions, in Python and in C++, against eager."""

import shutil

import pytest
import torch
from torch.autograd.function import once_differentiable

import compiled_autograd
from tests.compiled_autograd.support import COMPILERS, check, fresh, keep

compilers = pytest.mark.parametrize("compiler", COMPILERS)
SIZES = (10, 100, 10, 15, 20, 25)


class Sin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.cos(x)


class SavedTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x, None)
        return torch.sin(x)

    @staticmethod
    def backward(ctx, grad):
        one, two, nothing = ctx.saved_tensors
        assert nothing is None
        return grad * torch.cos(one) * torch.cos(two)


class Attribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.seen = True
        return grad * ctx.shape[0]


class SetupContext(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x * 2, x * 3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def vjp(ctx, two, three):
        (x,) = ctx.saved_tensors
        return (two * 2 + three * 3) * x


@compilers
@pytest.mark.parametrize("function", [Sin, SavedTwice, Attribute, SetupContext])
def test_functions_with_changing_sizes(compiler, function):
    def sizes():
        for size in SIZES:
            x = torch.arange(0.0, size, requires_grad=True)
            out = function.apply(x)
            (out[0] if isinstance(out, tuple) else out).sum().backward()
            yield x.grad

    stats = check(sizes, compiler, captures=1)
    assert stats.compiles <= 2


@compilers
def test_several_gradients_and_inputs_that_are_no_tensors(compiler):
    class Mixed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, number, y, flag=None):
            ctx.number = number
            return x * number, y + x

        @staticmethod
        def backward(ctx, first, second):
            assert ctx.needs_input_grad == (True, False, True, False)
            return first * ctx.number + second, None, second, None

    def mixed():
        for number in (2, 5):
            x, y = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
            first, second = Mixed.apply(x, number, y, "flag")
            (first * second).sum().backward()
            yield from (x.grad, y.grad)

    check(mixed, compiler, captures=1)


@pytest.mark.parametrize("by", ["method", "attribute"])
@pytest.mark.parametrize("materialize", [True, False])
def test_missing_gradients_are_materialized_or_not(materialize, by):
    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if by == "method":
                ctx.set_materialize_grads(materialize)
            else:
                ctx.materialize_grads = materialize
            return x * 2, x * 3

        @staticmethod
        def backward(ctx, first, second):
            Two.seen = (first is None, second is None)
            return (0 if first is None else first * 2) + (0 if second is None else second * 3)

    class Drop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    def missing():
        for dropped in (False, True):
            x = torch.ones(3, requires_grad=True)
            first, second = Two.apply(x)
            (first + Drop.apply(second) if dropped else first).sum().backward()
            yield x.grad
            yield Two.seen

    check(missing)


def test_non_differentiable_outputs():
    class Sorted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            values, indices = x.sort()
            ctx.mark_non_differentiable(indices)
            ctx.save_for_backward(indices)
            return values, indices

        @staticmethod
        @once_differentiable
        def backward(ctx, grad, unused):
            (indices,) = ctx.saved_tensors
            return torch.zeros_like(grad).index_add_(0, indices, grad)

    def ordered():
        x = torch.randn(5, requires_grad=True)
        values, _ = Sorted.apply(x)
        (values * torch.arange(5.0)).sum().backward()
        return x.grad

    check(ordered)


def test_once_differentiable_says_so_on_the_second_pass():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            return grad * 2 * ctx.saved_tensors[0]

    x = torch.randn(3, requires_grad=True)
    with fresh():
        (grad,) = torch.autograd.grad(
            Once.apply(x).sum(), x, torch.ones((), requires_grad=True), create_graph=True
        )
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


def test_classes_defined_in_a_loop_are_told_apart():
    def define(factor):
        class Dynamic(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * factor

            @staticmethod
            def backward(ctx, grad):
                return grad * factor

        return Dynamic

    def defined():
        for factor in (10, 20, 30):
            x = torch.arange(0.0, 10, requires_grad=True)
            define(factor).apply(x).sum().backward()
            yield x.grad

    check(defined, captures=3)


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (lambda g: (g, None), RuntimeError),
        (lambda g: (g, g, g), RuntimeError),
        (lambda g: (g[:2], None, None), RuntimeError),
        (lambda g: ("text", None, None), RuntimeError),
        (lambda g: (g, None, None, g), RuntimeError),
    ],
)
def test_wrong_results_are_eagers_errors(result, error):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, number, other):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return result(grad)

    def message():
        x, other = torch.randn(3, requires_grad=True), torch.randn(3)
        out = Wrong.apply(x, 1, other).sum()
        with pytest.raises(error) as caught:
            out.backward()
        return str(caught.value).split("\nException")[0]

    expected = message()
    with fresh():
        found = message()
    # C++ marks errors of its functional nodes, and they know one number less
    assert found.removeprefix("[Compiled Autograd Tracing:]").split(" at index")[0].split(" - ")[
        -1
    ] in expected or ("invalid gradient" in found and "invalid gradient" in expected)


def test_a_stashed_context_is_as_in_eager():
    class Stash(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            assert isinstance(ctx, torch.autograd.graph.Node)
            Stash.stashed = ctx
            return grad * ctx.saved_tensors[0]

    x = torch.randn(3, requires_grad=True)
    with fresh():
        Stash.apply(x).sum().backward()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            Stash.stashed.saved_tensors  # noqa: B018


def test_non_reentrant_checkpoint_of_a_custom_function():
    def checkpointed():
        x = torch.randn(4, requires_grad=True)
        y = torch.utils.checkpoint.checkpoint(lambda t: Sin.apply(t).exp(), x, use_reentrant=False)
        y.sum().backward()
        return x.grad

    check(checkpointed)


def test_compiled_forwards():
    def compiled():
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sigmoid())
        forward = torch.compile(model, backend="aot_eager")
        for _ in range(3):
            model.zero_grad()
            forward(torch.randn(2, 4)).sum().backward()
            yield [p.grad.clone() for p in model.parameters()]

    check(compiled, captures=1)


def test_custom_operators():
    @torch.library.custom_op("compiled_autograd_tests::scale", mutates_args=())
    def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    def setup(ctx, inputs, output):
        ctx.factor = inputs[1]

    scale.register_autograd(lambda ctx, grad: (grad * ctx.factor, None), setup_context=setup)

    def operator():
        for factor in (2.0, 3.0):
            x = torch.randn(3, requires_grad=True)
            scale(x, factor).exp().sum().backward()
            yield x.grad

    check(operator, captures=1)


CPP = """
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

template <bool traceable>
struct Scale : public torch::autograd::Function<Scale<traceable>> {
  static constexpr bool is_traceable = traceable;
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, double factor) {
    ctx->save_for_backward({x});
    ctx->saved_data["factor"] = factor;
    ctx->saved_data["flag"] = true;
    return x * factor;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    auto x = ctx->get_saved_variables()[0];
    return {grads[0] * ctx->saved_data["factor"].toDouble() + x - x, at::Tensor()};
  }
};
at::Tensor traceable(const at::Tensor& x, double factor) { return Scale<true>::apply(x, factor); }
at::Tensor opaque(const at::Tensor& x, double factor) { return Scale<false>::apply(x, factor); }
TORCH_LIBRARY(compiled_autograd_scale, library) {
  library.def("traceable", traceable);
  library.def("opaque", opaque);
}
"""


@pytest.fixture(scope="module")
def cpp_operators(tmp_path_factory):
    if shutil.which("g++") is None or shutil.which("ninja") is None:
        pytest.skip("needs g++ and ninja")
    from torch.utils.cpp_extension import load_inline

    load_inline(
        "compiled_autograd_scale",
        CPP,
        build_directory=str(tmp_path_factory.mktemp("cpp")),
        extra_cflags=["-O0"],
        is_python_module=False,
        no_implicit_headers=True,  # those of Python bindings take half a minute to compile
    )
    return torch.ops.compiled_autograd_scale


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["traceable", "opaque"])
@compilers
def test_cpp_functions(cpp_operators, kind, compiler):
    cpp_scale = getattr(cpp_operators, kind)

    def scaled():
        for size, factor in ((10, 2.0), (20, 2.0), (20, 5.0), (30, 5.0)):
            x = torch.arange(0.0, size, requires_grad=True)
            cpp_scale(x, factor).sin().sum().backward()
            yield x.grad

    check(scaled, compiler, captures=1)


def test_no_graph_holds_a_compiler_twice():
    with fresh(keep):
        for _ in range(2):
            x = torch.randn(3, requires_grad=True)
            Sin.apply(x).sum().backward()
    assert compiled_autograd.stats().compiles == 1
