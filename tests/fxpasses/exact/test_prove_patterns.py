"""Proofs of patterns: numbers that torch rounds, types of one byte, integers at their ends, random calls, and patterns that are left alone."""

import pytest
import torch
from torch import nn

from fxpasses import pattern_pass
from fxpasses.testing import NoSiteError, prove

F8 = torch.float8_e4m3fn


def test_an_epsilon_that_torch_rounds_is_the_same_epsilon():
    """``F.rms_norm`` becomes calls with ``9.999999974752427e-07``: what float32 makes of the one that is written."""

    def norm(x, w):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w

    def fused(x, w):
        return nn.functional.rms_norm(x, (8,), w, 1e-6)

    def other(x, w):
        return nn.functional.rms_norm(x, (8,), w, 2e-6)

    x, w = torch.randn(3, 8), torch.randn(8)
    assert prove(pattern_pass(norm, fused, [x, w]), norm, x, w).ok
    assert not prove(pattern_pass(norm, other, [x, w]), norm, x, w).ok


@pytest.mark.parametrize(
    ("before", "after", "is_right"),
    [
        (lambda x: x.clamp(-448, 448).to(F8).float(), lambda x: x.to(F8).float(), True),  # it saturates
        (lambda x: (x / 2).clamp(-448, 448).to(F8), lambda x: (x * 0.5).clamp(-448, 448).to(F8), True),
        (lambda x: x.to(F8).float() + 1, lambda x: x + 1, False),
        (lambda x: x.to(F8).bfloat16(), lambda x: x.to(torch.float8_e5m2).bfloat16(), False),
        (lambda x: (x / 2).to(F8).float() * 2, lambda x: x.to(F8).float(), False),  # subnormal numbers
    ],
)
def test_a_cast_to_one_byte_is_part_of_the_function(before, after, is_right):
    x = torch.randn(3, 8) * 1000
    assert prove(pattern_pass(before, after, [x]), before, x).ok is is_right


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("before", "after", "is_right"),
    [
        (lambda a, b: a < b, lambda a, b: (a - b) < 0, False),
        (lambda a, b: (a + 15) // 16 - b, lambda a, b: -((-a) // 16) - b, False),
        (lambda a, b: (a * 31 + b) % 1009, lambda a, b: ((a % 1009) * 31 + b % 1009) % 1009, False),
        (lambda a, b: (a * 6) // 3 - b, lambda a, b: a * 2 - b, False),
        (lambda a, b: (a + b) * 3, lambda a, b: a * 3 + b * 3, True),  # both wrap alike
        (lambda a, b: a % 8 - b, lambda a, b: (a & 7) - b, True),
        (lambda a, b: torch.maximum(a, b), lambda a, b: torch.where(a > b, a, b), True),
    ],
)
def test_integers_go_to_the_ends_of_their_type(before, after, is_right, dtype):
    inputs = [torch.randint(-99, 99, (9,), dtype=dtype) for _ in range(2)]
    assert prove(pattern_pass(before, after, inputs), before, *inputs).ok is is_right


def test_patterns_with_dropout():
    def dropped(x):
        return nn.functional.dropout(x, 0.5) * 3

    def scaled_first(x):
        return nn.functional.dropout(x * 3, 0.5)

    def dropped_less(x):
        return nn.functional.dropout(x * 3, 0.25)

    x = torch.randn(4, 8)
    assert prove(pattern_pass(dropped, scaled_first, [x]), dropped, x).ok
    assert prove(pattern_pass(dropped, scaled_first, [x])).ok
    assert not prove(pattern_pass(dropped, dropped_less, [x]), dropped, x).ok


def test_integers_that_divide():
    inputs = [torch.randint(1, 9, (3, 4)) for _ in range(2)]
    right = pattern_pass(
        lambda a, b: a // b * b, lambda a, b: torch.div(a, b, rounding_mode="floor") * b, inputs
    )
    wrong = pattern_pass(
        lambda a, b: a // b * b, lambda a, b: torch.div(a, b, rounding_mode="trunc") * b, inputs
    )
    assert not prove(wrong).ok
    assert prove(right).ok


@pytest.mark.filterwarnings("ignore")
def test_why_a_pattern_is_left_alone_is_said():
    x = torch.randn(4, 8)
    item = pattern_pass(lambda x: x.t().exp(), lambda x: x.exp().t().contiguous(), [x])
    with pytest.raises(NoSiteError, match=r"left alone at .*with strides \(4, 1\)"):
        prove(item, lambda x: x.t().exp(), x)
