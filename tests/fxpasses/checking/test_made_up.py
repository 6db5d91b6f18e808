"""Made-up inputs reach what a graph counts, and keep what an operator takes for granted; formulas that go over to another one are one function."""

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fxpasses import pattern_pass
from fxpasses.exact.bounds import inputs_with_rare_values
from fxpasses.testing import prove

torch.manual_seed(0)  # each process has the same inputs
ROWS, FLAGS = torch.randn(3, 6), torch.ones(3, 6, dtype=torch.bool).tril(3)
WORDS, PADDED = torch.randn(6), torch.tensor([3, 7, 9, 2, 0, 0])


def mean_of_flags(least):
    def mean(x, flags):
        count = flags.sum(-1)
        return (x * flags).sum(-1) / (count if least is None else count.clamp(min=least))

    return mean


def mean_of_words(least):
    def mean(x, words):
        flags = words != 0
        count = flags.sum()
        return (x * flags).sum() / (count if least is None else count.clamp(min=least))

    return mean


@pytest.mark.parametrize("least", [None, 2])
@pytest.mark.parametrize("mean", [mean_of_flags, mean_of_words])
def test_counts_of_nothing_and_of_one_are_tried(mean, least):
    given = (ROWS, FLAGS) if mean is mean_of_flags else (WORDS, PADDED)
    wrong = pattern_pass(mean(1), mean(least), given, name="counts")
    assert not prove(wrong, mean(1), *given).ok
    right = pattern_pass(mean(1), lambda *given: mean(1)(*given) * 3 / 3, given, name="same")
    assert prove(right, mean(1), *given).ok


def frequencies(t):
    return t[:, None] * torch.exp(-math.log(1e4) * torch.arange(4) / 4)


RIGHT = {
    "an activation that goes over to another formula": (
        lambda x, g: g * x.sigmoid(),
        lambda x, g: torch.where(x > 20, g, g * x.exp() / (x.exp() + 1)),  # as the gradient of softplus is
        *torch.randn(2, 3, 7),
    ),
    "numbers made of integers alone": (
        frequencies,
        lambda t: t[:, None] * 1e4 ** (-torch.arange(4) / 4),
        50 * torch.randn(5),
    ),
    "boundaries are sorted": (
        lambda x, boundaries: torch.searchsorted(boundaries, x),
        lambda x, boundaries: (boundaries < x[:, None]).sum(1),
        3 * torch.randn(5),
        torch.arange(6.0),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_rewrites_are_equal(name):
    before, after, *given = RIGHT[name]
    proof = prove(pattern_pass(before, after, tuple(given), name="right"), before, *given)
    assert proof.sites
    assert proof.ok, str(proof)


WRONG = {
    "a value that is a boundary": (
        lambda x, boundaries: torch.searchsorted(boundaries, x),
        lambda x, boundaries: (boundaries <= x[:, None]).sum(1),
        torch.randn(5),
        torch.arange(6.0),
    ),
    "a step that is far": (
        lambda x, step: torch.where(step < 100, x * step / 100, x),
        lambda x, step: torch.where(step <= 100, x * step / 99, x),
        torch.randn(5),
        torch.tensor(500),
    ),
    "the last class, among labels that may be ignored": (
        lambda x, labels: torch.nn.functional.cross_entropy(x, labels),
        lambda x, labels: torch.nn.functional.cross_entropy(x, labels.clamp(max=4)),
        torch.randn(4, 6),
        torch.tensor([0, 3, 2, 1]),
    ),
    "windows at a border, of negative values only where examples are positive": (
        lambda x: torch.nn.functional.max_pool2d(x, 3, 2, 1),
        lambda x: torch.nn.functional.max_pool2d(torch.nn.functional.pad(x, (1, 1, 1, 1)), 3, 2),
        torch.rand(1, 1, 6, 6),
    ),
    "zeros in one of two inputs": (
        lambda p, q: torch.where(p > 0, p * p.log(), 0.0).sum(-1) - (p * q.log()).sum(-1),
        lambda p, q: (p * (p.log() - q.log())).sum(-1),
        torch.rand(3, 5) + 0.1,
        torch.rand(3, 5) + 0.1,
    ),
    "large values in one of two inputs": (
        lambda m, v: m * m + v.exp() - v + m.tanh(),
        lambda m, v: m * m + v.exp() - v + (m.exp() - (-m).exp()) / (m.exp() + (-m).exp()),
        torch.randn(3, 5),
        torch.randn(3, 5),
    ),
    "bytes, one low where the other is high": (
        lambda a, b: (a.int() - b.int()).abs(),
        lambda a, b: (a - b).int().abs(),
        torch.full((4,), 200, dtype=torch.uint8),
        torch.full((4,), 100, dtype=torch.uint8),
    ),
    "integers that were one number again and again": (
        lambda a, b: (a < b) * 2,
        lambda a, b: (a < b) * 0,
        torch.full((4,), 200),
        torch.full((4,), 100),
    ),
    "lengths of rows that are all full": (
        lambda x, n: x.masked_fill(torch.arange(6) >= n[:, None], 0.0).sum(-1),
        lambda x, n: x.masked_fill(torch.arange(6) > n[:, None], 0.0).sum(-1),
        torch.randn(2, 6),
        torch.tensor([6, 6]),
    ),
    "a mean beyond a number": (
        lambda x: torch.where(x.mean() > 5, x * 2, x),
        lambda x: x + 0,
        torch.randn(4, 6),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_values_of_which_a_condition_becomes_true_are_tried(name):
    before, after, *given = WRONG[name]
    proof = prove(pattern_pass(before, after, tuple(given), name="wrong"), before, *given)
    assert proof.sites
    assert not proof.ok


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.uint16, torch.uint8, torch.int32])
def test_inputs_that_cannot_be_the_number_are_left_as_they_are(kind):
    given = [torch.randn(4), torch.tensor([3, 1, 0, 2]).to(kind)]
    gm = make_fx(lambda x, i: x * (i != -100))(given[0], given[1].int())
    assert len(list(inputs_with_rare_values(gm, given))) == (2 if kind is torch.int32 else 0)
