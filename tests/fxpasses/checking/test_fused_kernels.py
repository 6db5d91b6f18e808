"""Fused kernels are judged by their definition: what they lose at extreme values is no pass's fault, and what they are called with is."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxpasses
from fxpasses.checking.comparison.rounding import less_precise
from fxpasses.checking.comparison.values import Reference, compare, loses, value_names
from fxpasses.checking.execution.fused_kernels import recompute_by_definition
from fxpasses.checking.execution.interpret import ExactRun
from fxpasses.exact import equivalent

aten = torch.ops.aten
SIZE = (2, 2, 5, 8)


def draw(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, dtype=dtype).requires_grad_()


def defined(q, k, v, bias=None, scale=8**-0.5):
    scores = q @ k.mT * scale
    return (scores if bias is None else scores + bias).softmax(-1) @ v


def fused(q, k, v, bias=None, scale=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)


def joint(function, inputs):
    def ordered(*args):
        for x in args:
            x.shape  # noqa: B018  (inputs of the graph are in the order of their first use)
        return function(*args)

    return fxpasses.capture(ordered, *inputs).joint


def on(before, after, inputs):
    given = [*(x.detach() for x in inputs), torch.randn(SIZE, dtype=inputs[0].dtype)]
    reference = Reference(before, given)  # strides of gradients are others: values alone are compared
    return reference.rewriting(after).differences() or loses(reference, after, value_names(before, "joint"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_fused_before", [True, False])
@pytest.mark.parametrize("power", [0, 7, 14])
def test_what_the_kernel_loses_is_not_the_passs_fault(dtype, is_fused_before, power):
    torch.manual_seed(power)
    inputs = [draw(*SIZE, dtype=dtype) for _ in range(3)]
    graphs = [joint(function, inputs) for function in (fused, defined)]
    before, after = graphs if is_fused_before else graphs[::-1]
    large = [x.detach() * 2.0**power for x in inputs[:2]] + [inputs[2].detach()]
    assert on(before, after, large) == []


def test_rows_that_are_masked_by_the_smallest_number():
    torch.manual_seed(0)
    bias = torch.zeros(5, 5)
    bias[1] = torch.finfo(torch.float32).min
    inputs = [*(draw(*SIZE) for _ in range(3)), bias]
    before, after = (joint(function, inputs) for function in (fused, defined))
    for first, second in ((before, after), (after, before)):
        assert on(first, second, inputs) == []


@pytest.mark.parametrize(
    "wrong",
    [
        functools.partial(fused, scale=0.3),
        lambda q, k, v: fused(q, k, v, torch.eye(5)),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    ],
)
@pytest.mark.parametrize("power", [0, 14])
def test_another_scale_or_mask_is_found(wrong, power):
    torch.manual_seed(1)
    inputs = [draw(*SIZE) for _ in range(3)]
    before = joint(defined, inputs)
    after = joint(wrong, inputs)
    assert on(before, after, [x.detach() * 2.0**power for x in inputs])


def test_the_logarithm_that_was_saved_is_what_gradients_are_made_of():
    torch.manual_seed(2)
    inputs = [torch.randn(SIZE) for _ in range(4)]

    def gradients(q, k, v, g, factor: float = 1.0):
        out, total = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, out, total * factor, 0.0, False
        )

    before, same, other = (
        fxpasses.capture(functools.partial(gradients, factor=factor), *inputs).forward
        for factor in (1.0, 1.0, 1.5)
    )
    assert equivalent(before, same, inputs).kind == "EQUAL"
    assert equivalent(before, other, inputs).kind == "DIFFERENT"
    assert compare(Reference(before, inputs), other, value_names(before, "inference"))


@pytest.mark.parametrize("heads", [2, 1])
def test_the_definition_is_what_the_kernel_computes(heads):
    torch.manual_seed(3)
    q, g = (torch.randn(SIZE, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, heads, 5, 8, dtype=torch.float64) for _ in range(2))
    mask = torch.randn(5, 5, dtype=torch.float64).masked_fill(torch.ones(5, 5).triu(2) > 0, -math.inf)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    kernel = forward(q, k, v, attn_mask=mask)
    results = recompute_by_definition(
        forward, (q, k, v), {"attn_mask": mask}, [torch.empty_like(value) for value in kernel]
    )
    torch.testing.assert_close(results, list(kernel))
    args = (g, q, k, v, *kernel, 0.0, False)
    kernel = backward(*args, attn_mask=mask)
    results = recompute_by_definition(
        backward, args, {"attn_mask": mask}, [torch.zeros_like(value) for value in kernel]
    )
    torch.testing.assert_close(results, list(kernel))


def test_in_float64_gradients_of_large_scores_are_those_of_the_definition():
    torch.manual_seed(4)
    inputs = [draw(*SIZE) for _ in range(3)]
    large = [x.detach() * 2.0**14 for x in inputs] + [torch.ones(SIZE)]
    first, second = (ExactRun(joint(function, inputs)).results(large) for function in (fused, defined))
    assert first is not None
    assert second is not None
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("seed", range(4))
def test_gelu_and_its_definition_round_alike(seed):
    torch.manual_seed(seed)
    x = 2 * torch.randn(4, 64)
    written, kernel = (
        fxpasses.capture(function, x).forward
        for function in (lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))), F.gelu)
    )
    assert less_precise(written, kernel, [x]) == {}
    assert less_precise(kernel, written, [x]) == {}


def test_a_sigmoid_that_is_made_of_tanh_still_loses_digits():
    x = torch.linspace(-20, 20, 64)
    before, after = (
        fxpasses.capture(function, x).forward
        for function in (torch.sigmoid, lambda x: 0.5 * (1 + torch.tanh(x / 2)))
    )
    assert less_precise(before, after, [x])
