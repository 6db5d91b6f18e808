import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional as F

from fxpasses.passes import MoveMatmulBeforeGather
from tests.fxpasses.passes.support import (
    Wrapped,
    assert_golden,
    assert_left_alone,
    assert_trains,
    captured,
    rewrite,
)

PASS = MoveMatmulBeforeGather()
X = torch.linspace(-1, 1, 24).reshape(6, 4)
SMALL = torch.linspace(-1, 1, 2 * 4 * 3 * 3).reshape(2, 4, 3, 3)
LARGE = torch.linspace(-2, 1, 2 * 4 * 12 * 12).reshape(2, 4, 12, 12)
WEIGHT = torch.linspace(-1, 1, 8 * 3).reshape(8, 3)
KERNEL = torch.linspace(-1, 1, 3 * 8).reshape(3, 8, 1, 1)
BIAS = torch.linspace(1, 2, 3)
SOURCE, TARGET = torch.arange(48) % 6, torch.arange(48) // 8
FLOATS = (torch.float32, torch.float64)


def edges(x, weight):
    return torch.cat([x[SOURCE], x[TARGET]], -1) @ weight


def test_golden():
    with torch.no_grad():
        assert_golden(PASS, edges, X, WEIGHT)


def _upsampled(mode):
    return lambda x, kernel: F.conv2d(
        torch.cat([F.interpolate(x, size=(12, 12), mode=mode), LARGE.to(x.dtype)], 1), kernel
    )


GATHERED = {
    "a layer with a bias": lambda x, w, b: F.linear(x[SOURCE].view(4, 12, 4), w[:4].t(), b),
    "differences": lambda x, w: torch.cat([x[SOURCE] - x[TARGET], x[TARGET]], -1) @ w,
    "a factor for each row": lambda x, w: (x[SOURCE] * SOURCE[:, None].to(x.dtype) / 3) @ w[:4],
    "indices in two dimensions": lambda x, w: x.view(2, 3, 4)[SOURCE % 2, TARGET % 3] @ w[:4],
    "indices around a dimension": lambda x, w: x.view(2, 1, 3, 4)[SOURCE % 2, :, TARGET % 3] @ w[:4],
    "indices of the last dimensions": lambda x, w: x.view(4, 2, 3)[:, SOURCE % 2, TARGET % 3].t() @ w[:4],
    "an embedding": lambda x, w: F.embedding(SOURCE, x, padding_idx=0) @ w[:4],
    "selected rows": lambda x, w: x.index_select(0, SOURCE).flip(0)[:40] @ w[:4],
    "sums over neighbours": lambda x, w: (x[SOURCE].view(24, 2, 4).sum(1)) @ w[:4],
    "means, not kept": lambda x, w: -x[SOURCE].view(2, 24, 4).expand(3, 2, 24, 4).mean(1)[1] @ w[:4],
    "repeats": lambda x, w: x[:, None].repeat(3, 5, 1).reshape(90, 4) @ w[:4],
    "features in the middle": lambda x, w: x[SOURCE].view(4, 12, 4).transpose(1, 2).contiguous().transpose(1, 2) @ w[:4],
    "two reads of one gather": lambda x, w: (lambda g: torch.cat([g, g * 2], -1) @ w)(x[SOURCE]),
}  # fmt: skip


@pytest.mark.parametrize("name", GATHERED)
def test_gathered_rows(name):
    function = GATHERED[name]
    more = (BIAS,) if function.__code__.co_argcount == 3 else ()
    assert_trains(PASS, Wrapped(function, WEIGHT, *more), X, dtypes=FLOATS, backward=False)


def test_rows_that_are_no_view():
    """torch's fake tensors accept a view of ``[2, 1, 6, 4]`` as ``[12, 4]`` that its tensors do not."""

    def pairs(x, w):
        return torch.cat([x[:, :, None].expand(-1, -1, 6, -1), x[:, None].expand(-1, 6, -1, -1)], -1) @ w

    x = torch.linspace(-1, 1, 48).reshape(4, 6, 2).permute(2, 1, 0)
    assert_trains(PASS, Wrapped(pairs, WEIGHT), x, dtypes=FLOATS, backward=False)


@pytest.mark.parametrize(
    "function",
    [
        _upsampled("nearest"),
        _upsampled("bilinear"),
        lambda x, kernel: F.conv2d(F.interpolate(x, scale_factor=4.0), kernel[:, :4], BIAS.to(x.dtype)),
        lambda x, kernel: F.conv1d(F.pad(x[:, :, 0], (10, 10)), kernel[:, :4, :, 0]),
        lambda x, kernel: F.conv2d(F.avg_pool2d(x.repeat(1, 1, 3, 3), 3, 1, 1), kernel[:1, :4]),
    ],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_images(function, layout):
    x = SMALL.contiguous(memory_format=layout)
    assert_trains(PASS, Wrapped(function, KERNEL), x, dtypes=FLOATS, backward=False)


def test_a_view_of_the_result():
    """The result would have the strides of an expanded tensor."""

    def f(x, kernel):
        expanded = x[:, :, 0, :1].expand(2, 4, 30)
        return F.conv1d(expanded, kernel[:, :4, :, 0]).relu().view(2, 90)

    assert_trains(PASS, Wrapped(f, KERNEL), SMALL, dtypes=FLOATS, backward=False)


def test_layers_in_a_row():
    def f(x, weight, second):
        h = torch.cat([x[SOURCE], x[TARGET]], -1) @ weight
        return torch.cat([h[SOURCE], h[TARGET]], -1).relu() + h[TARGET] @ second

    model = Wrapped(f, WEIGHT, torch.eye(3).repeat(1, 2))
    assert_trains(PASS, model, X, dtypes=FLOATS, backward=False)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: x[:5] @ w[:4],  # no row is read twice
        lambda x, w: x[SOURCE].relu() @ w[:4],  # not linear
        lambda x, w: (x[SOURCE] + 1) @ w[:4],  # nor is this
        lambda x, w: (x[SOURCE] * x[TARGET]) @ w[:4],  # nor this, in either
        lambda x, w: x.t()[:, SOURCE].reshape(48, 4) @ w[:4],  # features and rows are mixed
        lambda x, w: x[:, torch.arange(8) % 4] @ w,  # features are gathered
        lambda x, w: x[x[:, 0] > 0] @ w[:4],
        lambda x, w: (lambda g: (x.add_(1), g @ w[:4])[1])(x[SOURCE]),  # the rows are those before the change
    ],
)
def test_left_alone(function):
    with torch.no_grad():
        assert_left_alone(PASS, function, X.clone(), WEIGHT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_left_alone(dtype):
    with torch.no_grad():
        assert_left_alone(PASS, edges, X.to(dtype), WEIGHT.to(dtype))


def test_no_rows_and_no_features():
    with torch.no_grad():
        assert_left_alone(PASS, lambda x, w: x[:0][SOURCE[:0]] @ w[:4], X, WEIGHT)
        assert_left_alone(PASS, lambda x, w: x[SOURCE][:, :0] @ w[:0], X, WEIGHT)


def test_gain_is_an_option():
    with torch.no_grad():
        assert_left_alone(MoveMatmulBeforeGather(gain=1000.0), edges, X, WEIGHT)


_MOVES = (
    lambda x: x[torch.arange(12) % x.shape[0]],
    lambda x: x.flip(0),
    lambda x: F.pad(x, (0, 0, 1, 2)),
    lambda x: x * (torch.arange(x.shape[0], dtype=x.dtype)[:, None] - 2),
    lambda x: x[:, None].expand(-1, 2, -1).reshape(-1, x.shape[1]),
    lambda x: torch.cat([x, x[:2]]),
    lambda x: x - x.mean(0, keepdim=True),
    lambda x: x[1:],
    lambda x: -x / 2,
)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(_MOVES), min_size=1, max_size=4), st.booleans())
def test_any_moves_of_rows(moves, joins):
    def f(x, source, weight):
        x = x[source]
        for move in moves:
            x = move(x)
        return torch.cat([x, x.flip(0)], -1) @ weight if joins else x @ weight[:4]

    inputs = X.double(), SOURCE, WEIGHT.double()
    with torch.no_grad():
        gm = captured(f, *inputs)
        assert rewrite(MoveMatmulBeforeGather(gain=0.1), gm)
        assert torch.allclose(gm(*inputs)[0], f(*inputs))
