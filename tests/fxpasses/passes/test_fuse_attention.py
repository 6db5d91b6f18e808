import pytest
import torch

from fxpasses.passes import FuseAttention
from tests.fxpasses.passes.support import (
    Wrapped,
    assert_golden,
    assert_left_alone,
    assert_trains,
    captured,
    rewrite,
)

PASS = FuseAttention()
Q, K, V = (torch.randn(2, 3, size, 8, generator=torch.Generator().manual_seed(size)) for size in (5, 6, 6))
MASK = torch.zeros(2, 1, 5, 6).masked_fill(torch.ones(5, 6).triu(2).bool(), float("-inf"))


def attention(q, k, v, mask=None, scale=0.25):
    scores = q @ k.transpose(-1, -2) * scale
    return (scores if mask is None else scores + mask).softmax(-1) @ v


def in_float32(q, k, v):
    scores = (q.bfloat16() @ k.bfloat16().transpose(-1, -2)).float()
    return (scores.softmax(-1).bfloat16() @ v.bfloat16()).float()


def test_golden():
    assert_golden(PASS, attention, Q, K, V, MASK)


@pytest.mark.parametrize(
    "function",
    [
        attention,
        lambda q, k, v: attention(q[0], k[0], v[0]),
        lambda q, k, v: attention(q, k, v, MASK.to(q.dtype)),
        lambda q, k, v: attention(q, k, v, MASK[:1, :, :1].to(q.dtype)),
        lambda q, k, v: attention(q, k, v, MASK[0, 0].to(q.dtype)),
        lambda q, k, v: attention(q[0], k[0], v[0], MASK[0, 0].to(q.dtype)),
        lambda q, k, v: attention(q, k, v, scale=-3.0),
        lambda q, k, v: ((q @ k.mT) / 2).softmax(-1) @ v,
        lambda q, k, v: attention(q.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3), k, v) + 1,
        lambda q, k, v: attention(q[..., ::2], k[..., ::2], v[..., ::2]),
        lambda q, k, v: attention(q[:, :1], k[:, :1], v[:, :1]),
        lambda q, k, v: attention(q[:, :, -1:], k, v),
    ],
)
def test_results(function):
    assert_trains(PASS, Wrapped(function), Q, K, V, backward=False, dtypes=(torch.float32, torch.float64))


@pytest.mark.parametrize("hidden", [float("-inf"), torch.finfo(torch.float32).min])
@pytest.mark.parametrize(("shift", "causal"), [(1, True), (2, False), (0, False)])
def test_a_constant_causal_mask_is_the_kernels_own(hidden, shift, causal):
    def function(q, k, v):
        later = torch.ones(6, 6, dtype=torch.bool).triu(shift)
        return attention(q, k, v, torch.zeros((), dtype=q.dtype).masked_fill(later, hidden))

    inputs = (K + 1, K, V)
    gm = captured(function, *inputs)
    assert rewrite(PASS, gm)
    (call,) = [n for n in gm.graph.nodes if "attention" in str(n.target)]
    assert (call.args[4], call.kwargs.get("attn_mask") is None) == (causal, causal)
    if shift:  # otherwise a row has nothing to look at: NaN
        torch.testing.assert_close(gm(*inputs)[0], function(*inputs))


@pytest.mark.parametrize(
    "function",
    [
        in_float32,
        lambda q, k, v: attention(q[0, 0], k[0, 0], v[0, 0]),  # matrices: no heads
        lambda q, k, v: attention(q, k, v[..., :4]),  # narrower values
        lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
        lambda q, k, v: (lambda w: (w @ v, w))((q @ k.mT).softmax(-1)),  # the weights are returned
        lambda q, k, v: (lambda s: (s.softmax(-1) @ v, s.sum()))(q @ k.mT),
        lambda q, k, v: (q @ k.mT).sigmoid() @ v,
    ],
)
def test_left_alone(function):
    with torch.no_grad():
        assert_left_alone(PASS, function, Q, K, V)
