"""Tolerances come from rounding: what it does to each operator, in each type."""

from __future__ import annotations

import re

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxpasses
from fxpasses.checking.comparison.rounding import distance, spacing
from fxpasses.checking.comparison.same_function import differences_in_float64, is_native
from fxpasses.checking.comparison.values import Reference, compare
from fxpasses.checking.execution.inputs import cloned
from fxpasses.checking.execution.interpret import ExactRun, Run

aten = torch.ops.aten
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def graph(function):
    return fx.symbolic_trace(function)


def length(x):
    """The size as a value of the graph: a call without one would run while the graph is made."""
    return [aten.sym_size.int(x, 0)]


def differences(before, after, *inputs, bitwise=False):
    names = [f"value {i}" for i in range(9)]
    return compare(Reference(graph(before), inputs), graph(after), names, bitwise)


@pytest.mark.parametrize("dtype", DTYPES)
def test_spacing_is_the_distance_to_the_next_number(dtype):
    values = torch.tensor([1.0, 1.5, 3.0, 100.0, 1e-3], dtype=dtype)
    wide = values.double()
    unit = spacing(wide, dtype)
    assert (wide + unit).to(dtype).ne(values).all()
    assert (wide + unit / 4).to(dtype).eq(values).all() or dtype is torch.float64


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_in_another_order_are_right(dtype):
    x = torch.randn(400, 7).to(dtype)
    assert not differences(
        lambda x: (aten.sum.dim_IntList(x, [0]),),
        lambda x: (aten.sum.dim_IntList(aten.flip.default(x, [0]), [0]),),
        x,
    )


@pytest.mark.parametrize(
    ("dtype", "factor"), [(torch.float32, 1 + 1e-5), (torch.bfloat16, 1.02), (torch.float16, 1.004)]
)
def test_a_factor_is_wrong_where_the_type_can_tell(dtype, factor):
    x = torch.randn(400).to(dtype)
    (found,) = differences(
        lambda x: (aten.sin.default(x),), lambda x: (aten.mul.Tensor(aten.sin.default(x), factor),), x
    )
    assert found.fault == "value"
    assert "became" in found.problem


def test_what_cancels_may_be_off_by_its_terms():
    x = torch.randn(1000) * 1e4
    assert not differences(
        lambda x: (aten.sum.default(aten.sub.Tensor(x, aten.mean.default(x))),),
        lambda x: (aten.sub.Tensor(aten.sum.default(x), aten.mul.Tensor(aten.mean.default(x), 1000)),),
        x,
    )


def test_an_index_that_rounding_turns_over_is_no_mistake_and_any_other_is():
    def largest(x):
        return (aten.argmax.default(aten.sum.dim_IntList(x, [1])),)

    def in_another_order(x):
        return (aten.argmax.default(aten.sum.dim_IntList(aten.flip.default(x, [1]), [1])),)

    def smallest(x):
        return (aten.argmin.default(aten.sum.dim_IntList(x, [1])),)

    row = torch.rand(1000)
    ties = torch.stack([row[torch.randperm(1000)] for _ in range(20)])
    assert not differences(largest, in_another_order, ties)
    apart = torch.rand(20, 1000)
    assert not differences(largest, in_another_order, apart)
    assert differences(largest, smallest, apart)


def test_bitwise_means_every_bit():
    x = torch.randn(100)
    before = lambda x: (aten.div.Tensor(x, 3),)  # noqa: E731
    after = lambda x: (aten.mul.Tensor(x, 1 / 3),)  # noqa: E731
    assert not differences(before, after, x)
    assert differences(before, after, x, bitwise=True)


@pytest.mark.parametrize("poisoned", ["empty", "empty_like", "new_empty", "empty_strided"])
def test_every_kind_of_uninitialised_memory_is_poisoned(poisoned):
    makers = {
        "empty": lambda x: aten.empty.memory_format(length(x)),
        "empty_like": lambda x: aten.empty_like.default(x),
        "new_empty": lambda x: aten.new_empty.default(x, length(x)),
        "empty_strided": lambda x: aten.empty_strided.default(length(x), [1]),
    }
    found = differences(
        lambda x: (aten.add.Tensor(x, aten.zeros.default(length(x))),),
        lambda x: (aten.add.Tensor(x, makers[poisoned](x)),),
        torch.ones(3),
    )
    assert found


def test_uninitialised_integers_are_poisoned_too():
    found = differences(
        lambda x: (aten.zeros.default(length(x), dtype=torch.int64),),
        lambda x: (aten.empty.memory_format(length(x), dtype=torch.int64),),
        torch.ones(3),
    )
    assert found


def test_what_the_reference_leaves_undefined_may_be_anything():
    assert not differences(
        lambda x: (aten.empty.memory_format(length(x)),),
        lambda x: (aten.zeros.default(length(x)),),
        torch.ones(3),
    )


def test_parts_of_one_memory_that_do_not_overlap_are_not_aliases():
    def separate(x):
        return aten.clone.default(aten.slice.Tensor(x, 1, 0, 2)), aten.clone.default(
            aten.slice.Tensor(x, 1, 2, 4)
        )

    def shared(x):
        y = aten.clone.default(x)
        return aten.slice.Tensor(y, 1, 0, 2), aten.slice.Tensor(y, 1, 2, 4)

    def overlapping(x):
        y = aten.clone.default(aten.slice.Tensor(x, 1, 0, 2))
        return y, aten.view.default(y, [3, 2])

    x = torch.randn(3, 4)
    assert {m.fault for m in differences(separate, shared, x)} == {"metadata"}  # the strides, not the memory
    same = torch.cat([x[:, :2], x[:, :2]], 1)
    assert {m.fault for m in differences(separate, overlapping, same)} == {"aliasing"}
    once, twice = (lambda x: (x.sin(),)), (lambda x: (x, x.view(-1), x.sin()))
    assert {m.problem for m in differences(once, twice, x)} == {"2 results became 4"}


def test_copies_share_memory_where_the_originals_do():
    base = torch.randn(3, 4)
    first, second = cloned([base.t(), base[1]])
    assert first.stride() == base.t().stride()
    first.zero_()
    assert not second.any()
    assert base.any()


def test_both_precisions_draw_the_same_random_numbers():
    gm = graph(lambda x: (aten.mul.Tensor(x, aten.bernoulli.p(x, 0.5)),))
    for node in gm.graph.nodes:
        node.meta["val"] = torch.randn(8)
    x = torch.rand(8) + 1
    runs = [run([x.clone()]) for run in (Run(gm), ExactRun(gm))]
    masks = [(out != 0).tolist() for (out,) in runs]
    assert masks[0] == masks[1]
    assert runs[1][0].dtype is torch.float64


@pytest.mark.parametrize("lazily", [False, True])
def test_complex_results_are_compared_whether_or_not_they_are_conjugated_in_memory(lazily):
    def conjugated(x):
        return (aten._conj.default(aten.clone.default(x)) if lazily else aten.conj_physical.default(x),)

    x = torch.randn(5, dtype=torch.complex64)
    assert not differences(conjugated, lambda x: (aten.conj_physical.default(x),), x)
    (found,) = differences(conjugated, lambda x: (aten.clone.default(x),), x)
    assert found.fault == "value"
    assert "element [0]" in found.problem


def test_complex_sums_in_another_order_are_right():
    x = torch.randn(400, 7, dtype=torch.complex64)
    (after,) = differences(
        lambda x: (aten.sum.dim_IntList(x, [0]),),
        lambda x: (aten.mul.Tensor(aten.sum.dim_IntList(x, [0]), 1 + 1e-5),),
        x,
    )
    assert after.fault == "value"
    for seed in range(5):
        x = torch.randn(400, 7, dtype=torch.complex64, generator=torch.Generator().manual_seed(seed))
        assert not differences(
            lambda x: (aten.sum.dim_IntList(x, [0]),),
            lambda x: (aten.sum.dim_IntList(aten.flip.default(x, [0]), [0]),),
            x,
        )


def test_an_error_is_told_for_the_element_that_is_named():
    x = torch.tensor([1e6, 1.0])
    (found,) = differences(
        lambda x: (aten.sin.default(x), aten.mul.Tensor(x, 3.0)),
        lambda x: (aten.sin.default(x), aten.add.Tensor(aten.mul.Tensor(x, 3.0), 0.25)),
        x,
    )
    assert found.position == 1
    told = re.search(r"element \[\d\]: (\S+) became ([\d.]+)", found.problem)
    assert told
    assert float(told[2]) - float(told[1]) == pytest.approx(0.25)  # of one element, not of two


def test_zeros_in_float64_are_neither_a_finding_nor_hide_one():
    exact = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    close = torch.tensor([0.0, 1.0, 2.0 + 2**-51], dtype=torch.float64)
    assert distance(exact, close, [exact]).times < 16
    found = distance(exact, exact * 1.001, [exact])
    assert found.times > 1e6
    assert found.element == (2,)
    assert "off by 0.00" in str(found)


def test_only_the_sign_of_a_zero_is_told():
    (found,) = differences(
        lambda x: (aten.mul.Tensor(x, 0.0),),
        lambda x: (aten.mul.Tensor(x, -0.0),),
        torch.ones(2),
        bitwise=True,
    )
    assert "element [0]: 0 became -0" in found.problem


def test_an_operator_that_does_not_know_float64_runs_in_its_own_type():
    with torch.library._scoped_library("only_float32", "FRAGMENT") as library:
        library.define("half(Tensor x) -> Tensor")

        def half(x):
            assert x.dtype is torch.float32
            return x / 2

        library.impl("half", half, "CPU")
        operator = torch.ops.only_float32.half.default

        def scaled(factor):
            return graph(lambda x: (operator(aten.sin.default(x)) * factor,))

        gm, wrong, right = scaled(3.0), scaled(3.01), scaled(3.0)
        for node in (n for g in (gm, wrong, right) for n in g.graph.nodes):
            node.meta["val"] = torch.ones(4)
        x = torch.randn(4)
        names = ["result", "x"]
        assert compare(Reference(gm, [x]), wrong, names)
        assert not compare(Reference(gm, [x]), right, names)
        run = ExactRun(gm)
        run([x])
        assert run.max_relative_error == torch.finfo(torch.float32).eps


def test_what_float64_leaves_of_terms_that_cancel_is_no_difference():
    x = torch.randn(64) * 2.0**24

    def cancels(x):
        x = aten.add.Tensor(x, 0.1)
        return (aten.sub.Tensor(aten.sum.default(x), aten.select.int(aten.cumsum.default(x, 0), 0, 63)),)

    before, after = graph(cancels), graph(lambda x: (aten.mul.Tensor(aten.sum.default(x), 0.0),))
    other = graph(lambda x: (aten.mul.Tensor(aten.sum.default(x), 1e-14),))
    names = ["value 0", "value 1"]
    assert compare(Reference(before, [x], samples=0), after, names) == []
    assert compare(Reference(before, [x], samples=0), other, names)


def attention_gradient(cancels, factor=1.0):
    """The gradient of a softmax whose terms cancel exactly where it is saturated, or as fused kernels compute it: they take the sum from the output."""

    def gradient(s, v, g):
        p = s.softmax(-1)
        dp = g @ v.transpose(-1, -2)
        total = (p * dp).sum(-1, keepdim=True) if cancels else (p @ v * g).sum(-1, keepdim=True)
        return p * (dp - total * factor)

    return gradient


def log_gradient(first, factor=1.0):
    """What a logarithm of sums hands back: scaled by the exponential, or in logarithms, as kernels do it."""

    def gradient(x, g):
        lse, large = x.logsumexp(-1, keepdim=True), g.abs() + 1
        return (x - lse).exp() * large if first else (large.log() - lse + x * factor).exp()

    return gradient


def wide(before, after, *inputs):
    return differences_in_float64(make_fx(before)(*inputs), make_fx(after)(*inputs), inputs)


@pytest.mark.parametrize("scale", [1.0, 2.0**8, 2.0**20])
def test_noise_of_either_graph_is_no_difference(scale):
    s, v, g = (torch.randn(size) for size in [(3, 6, 6), (3, 6, 8), (3, 6, 8)])
    s, g = scale * s, scale * g
    ways = attention_gradient(True), attention_gradient(False)
    assert wide(*ways, s, v, g) == [] == wide(*ways[::-1], s, v, g)
    logs = log_gradient(True), log_gradient(False)
    assert wide(*logs, s[0], g[0, :, :6]) == [] == wide(*logs[::-1], s[0], g[0, :, :6])


@pytest.mark.parametrize("scale", [1.0, 2.0**8])
def test_what_is_more_than_noise_is_one(scale):
    s, v, g = (torch.randn(size) for size in [(3, 6, 6), (3, 6, 8), (3, 6, 8)])
    s, g = scale * s, scale * g
    ways = attention_gradient(True), attention_gradient(False, 1 + 1e-7)
    assert wide(*ways, s, v, g)
    assert wide(*ways[::-1], s, v, g)
    logs = log_gradient(True), log_gradient(False, 1 + 1e-7)
    assert wide(*logs, s[0], g[0, :, :6])
    assert wide(*logs[::-1], s[0], g[0, :, :6])


@torch.library.custom_op("checked_tolerance::sine", mutates_args=())
def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


sine.register_fake(torch.empty_like)
sine.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@pytest.mark.parametrize(("function", "expected"), [(torch.sin, True), (sine, False)])
def test_regions_compute_in_float64_if_their_operators_do(function, expected):
    """What follows is compared to the last digits: a gradient may be small."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return x + function(self.linear(x))

    found = []

    def look(gm):
        regions = [node for node in gm.graph.nodes if getattr(node.target, "namespace", "") == "fxpasses"]
        found.append((bool(regions), is_native(gm)))
        return False

    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(4)), nn.Linear(4, 2))
    passes = ["default", fxpasses.graph_pass(look, name="look", graphs=["joint"])]
    options = {"compiler": "eager", "check": "values", "regions": "always", "passes": passes}
    torch.compile(model, backend="fxpasses", options=options)(torch.randn(3, 4)).sum().backward()
    assert (True, expected) in found
    assert (True, not expected) not in found
