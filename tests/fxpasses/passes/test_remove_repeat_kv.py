import pytest
import torch
from torch.nn import functional as F

from fxpasses.passes import RemoveRepeatKv
from tests.fxpasses.passes.support import Wrapped, assert_golden, assert_left_alone, assert_trains

PASS = RemoveRepeatKv()
Q, K, V = (torch.randn(2, heads, 5, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
for tensor in (Q, K, V):
    tensor.requires_grad_()
MASK = torch.zeros(2, 1, 5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))


def attention(q, k, v, **how):
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    return F.scaled_dot_product_attention(q, k, v, **how)


def test_golden():
    assert_golden(PASS, lambda q, k, v: attention(q, k, v, is_causal=True), Q, K, V)


@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"scale": 0.3}])
def test_results_and_gradients(how):
    assert_trains(PASS, Wrapped(lambda *qkv: attention(*qkv, **how)), Q, K, V)


def test_masks():
    model = Wrapped(lambda q, k, v, m: attention(q, k, v, attn_mask=m.to(q.dtype)))
    assert_trains(PASS, model, Q, K, V, MASK)


def test_one_token():
    model = Wrapped(lambda q, k, v: attention(q[:, :, -1:], k, v))
    assert_trains(PASS, model, Q, K, V, backward=False)


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
        ),  # other order
        lambda q, k, v: F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat(1, 2, 1, 1)),
        lambda q, k, v: F.scaled_dot_product_attention(q[:, :2], k, v),  # nothing is repeated
    ],
)
def test_left_alone(function):
    assert_left_alone(PASS, function, Q, K, V)
