"""What a graph answers about numbers that are not finite: its flags, counts and finite results are held to it; what nobody asked about is not."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

import fxpasses
from fxpasses import pattern_pass
from fxpasses.checking.comparison.values import Reference, compare, value_names
from fxpasses.checking.execution.inputs import made_up
from fxpasses.testing import prove

X, W = torch.randn(4, 6), torch.randn(4, 6)


def found(before, after, *inputs):
    """What is wrong on inputs that are not finite."""
    taking_all = [lambda *values, f=f: (f(*values), *(v * 2 for v in values)) for f in (before, after)]
    first, second = (fxpasses.capture(f, *inputs).forward for f in taking_all)
    names = value_names(first, "inference")
    values = [
        made_up(inputs, family, torch.Generator().manual_seed(seed))
        for family in ("not a number", "infinity")
        for seed in range(3)
    ]
    return [m for given in values for m in compare(Reference(first, given, samples=0), second, names)]


def clipped(x):
    norm = x.norm()
    return torch.where(norm.isfinite(), x / norm.clamp(min=1.0), 0.0)


ANSWERS = {
    "how many are bad": (
        lambda x, w: (~x.isfinite()).sum(),
        lambda x, w: x.numel() - x.isfinite().sum(),
        lambda x, w: x.isnan().sum(),
    ),
    "a step that is left out": (
        lambda x, w: torch.where((x.abs() == math.inf).any() | (x != x).any(), w, w - x),
        lambda x, w: torch.where(x.isfinite().all(), w - x, w),
        lambda x, w: torch.where((x != x).any(), w, w - x),
    ),
    "one flag a row": (
        lambda x, w: (x.isnan().any(-1), x * 2),
        lambda x, w: (x.isnan().sum(-1) > 0, x + x),
        lambda x, w: (x.isnan().all(-1), x + x),
    ),
    "a mean of what is there": (
        lambda x, w: torch.where(x.isfinite(), x, 0).sum() / x.isfinite().sum(),
        lambda x, w: x.masked_fill(~x.isfinite(), 0).sum() / (1.0 * x.isfinite()).sum(),
        lambda x, w: torch.where(x.isfinite(), x, 0).sum() / x.numel(),
    ),
    "a norm that clips": (
        lambda x, w: clipped(x),
        lambda x, w: torch.where((~x.norm().isfinite()).logical_not(), x / x.norm().clamp(min=1.0), 0.0),
        lambda x, w: torch.where(x.norm().isfinite(), x / x.norm().clamp(min=1.0), w),
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_about_what_is_not_finite_is_held_to_it(name):
    before, right, wrong = ANSWERS[name]
    assert found(before, right, X, W) == []
    assert found(before, wrong, X, W)


NOT_ASKED = {
    "flags behind a sum": (lambda x: x > 0, lambda x: x / x.norm(dim=-1, keepdim=True) > 0),
    "the largest of probabilities": (lambda x: x.argmax(-1), lambda x: x.softmax(-1).argmax(-1)),
    "a comparison turned around": (lambda x: ~(x <= 0.5), lambda x: x > 0.5),
    "beside an answer": (
        lambda x: (x.isnan().any(), (x * 3).argmax(-1)),
        lambda x: (x.isnan().any(), (x * 3).softmax(-1).argmax(-1)),
    ),
}


@pytest.mark.parametrize("name", NOT_ASKED)
def test_what_nobody_asked_about_is_left_open(name):
    assert found(*NOT_ASKED[name], X) == []


@pytest.mark.parametrize("wrong", [False, True])
def test_prove_looks_there(wrong):
    def bad(x):
        return (~x.isfinite()).any()

    def after(x):
        return torch.zeros((), dtype=torch.bool) if wrong else ~x.isfinite().all()

    assert prove(pattern_pass(bad, after, [X], name="flag"), lambda x: bad(x * 2), X).ok is not wrong


def guarded(x, at=(math.inf, -math.inf)):
    """The logarithm of a sum of exponentials, whose shift is zero where the largest is one of some infinities."""
    largest = x.amax(-1, keepdim=True)
    bad = torch.stack([largest == number for number in at]).any(0)
    shift = torch.where(bad, torch.zeros_like(largest), largest)
    return (x - shift).exp().sum(-1).log() + shift[..., 0]


def safe(x):
    return guarded(x)


def entropy(x, t):
    return torch.logsumexp(x, -1) - x.gather(-1, t[:, None])[:, 0]


def pair(x):
    return torch.logaddexp(x[:, 0], x[:, 1])


LOGARITHMS = {
    "of the operator": (lambda x: torch.logsumexp(x, -1), guarded),
    "of the user": (safe, lambda x: torch.logsumexp(x, -1)),
    "of two": (pair, lambda x: torch.logsumexp(x[:, :2], -1)),
    "of parts": (
        lambda x: torch.logsumexp(x, -1),
        lambda x: torch.logaddexp(torch.logsumexp(x[:, :2], -1), torch.logsumexp(x[:, 2:], -1)),
    ),
}
WRONG_LOGARITHMS = {
    "not shifted less": (lambda x: torch.logsumexp(x, -1), lambda x: guarded(x, (math.nan,))),
    "a masked row alone": (lambda x: torch.logsumexp(x, -1), lambda x: guarded(x, (-math.inf,))),
    "infinity alone": (safe, lambda x: guarded(x, (math.inf,))),
    "zero for a masked row": (
        lambda x: torch.logsumexp(x, -1),
        lambda x: torch.logsumexp(x, -1).clamp(min=-1e4),
    ),
    "of two": (pair, lambda x: x[:, 0] + (1 + (x[:, 1] - x[:, 0]).exp()).log()),
    "numbers that are left out": (
        lambda x: torch.where(x.isinf(), torch.zeros_like(x), x).sum(-1),
        lambda x: torch.where(x == math.inf, torch.zeros_like(x), x).sum(-1),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOGARITHMS)
def test_logarithms_of_sums_are_the_same_at_infinity(name, dtype):
    before, after = LOGARITHMS[name]
    x = X.to(dtype)
    proof = prove(pattern_pass(before, after, [x], name="other"), before, x, decompose=False)
    assert proof.ok, proof


@pytest.mark.parametrize("decompose", [True, False])
@pytest.mark.parametrize("name", WRONG_LOGARITHMS)
def test_logarithms_of_sums_that_are_others_at_infinity(name, decompose):
    before, after = WRONG_LOGARITHMS[name]
    assert not prove(pattern_pass(before, after, [X], name="other"), before, X, decompose=decompose).ok


@pytest.mark.parametrize("decompose", [True, False])
def test_a_loss_of_which_a_logarithm_is_a_part_may_be_no_number_at_infinity(decompose):
    def usual(x, t):
        return torch.nn.functional.cross_entropy(x, t, reduction="none")

    inputs = [X, torch.tensor([1, 0, 3, 5])]
    proof = prove(pattern_pass(entropy, usual, inputs, name="usual"), entropy, *inputs, decompose=decompose)
    assert proof.ok, proof


SEVERAL_RESULTS = {
    "a dilated input": (
        lambda x, w: functional.conv_transpose1d(x, w, stride=2),
        lambda x, w: functional.conv1d(
            functional.pad(torch.stack([x, torch.zeros_like(x)], -1).flatten(-2)[..., :-1], (2, 2)),
            w.flip(-1).transpose(0, 1),
        ),
    ),
    "a matrix of the weights": (
        lambda x, w: functional.conv1d(x, w.transpose(0, 1)),
        lambda x, w: sum(
            functional.pad(torch.einsum("bct,co->bot", x, w[..., at]), (2 - at, at)) for at in range(3)
        )[..., 2:-2],
    ),
    "a depthwise one with zeros beside it": (
        lambda x, w: functional.conv1d(x, w[:, :1], groups=2),
        lambda x, w: functional.conv1d(x, w[:, :1].transpose(0, 1) * torch.eye(2)[:, :, None]),
    ),
}


@pytest.mark.parametrize("name", SEVERAL_RESULTS)
def test_a_call_with_several_results_of_floats_keeps_nothing(name):
    x, w = torch.randn(2, 2, 7, requires_grad=True), torch.randn(2, 2, 3, requires_grad=True)
    in_order = [lambda x, w, f=f: (x * 2, w * 2, f(x, w)) for f in SEVERAL_RESULTS[name]]
    before, after = (fxpasses.capture(f, x, w).joint for f in in_order)
    names = value_names(before, "joint")
    last = before.graph.find_nodes(op="placeholder")[2:]
    for bad in (0, 1):
        values = [x.detach().clone(), w.detach().clone(), *(torch.randn(n.meta["val"].shape) for n in last)]
        values[bad].view(-1)[0] = math.nan
        found = compare(Reference(before, values, samples=0), after, names)
        assert [m for m in found if m.fault != "metadata"] == []


def times_mask(before, mask):
    return pattern_pass(
        lambda x, mask: torch.where(mask, x, torch.zeros(3, 6)),
        lambda x, mask: x * mask.to(x.dtype),
        (before, mask),
        name="times_mask",
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("f", [torch.exp, torch.sin, torch.sqrt, lambda x: x * 2])
def test_a_mask_is_no_factor_wherever_it_is(f, seed):
    """Behind a call, in a training graph: what is drawn for the input has to be where the mask hides it."""
    torch.manual_seed(seed)
    torch._dynamo.reset()
    x, mask = (torch.rand(3, 6) + 0.1).requires_grad_(), torch.rand(3, 6) < 0.6
    options = {"check": "values", "passes": [times_mask(x.detach(), mask)], "compiler": "eager"}
    compiled = torch.compile(
        lambda x, mask: torch.where(mask, f(x), torch.zeros(3, 6)).sum(-1),
        backend="fxpasses",
        options=options,
    )
    with pytest.raises(fxpasses.ValueMismatchError):
        compiled(x, mask)
