"""The same operators with other settings from call to call: each call has the gradients of its own settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import compiled_autograd
from tests.compiled_autograd.support import flat, keep

Function = Callable[[torch.Tensor, Any], torch.Tensor]

SETTINGS: dict[str, tuple[Function, Sequence[Any], tuple[int, ...]]] = {
    "transpose": (lambda x, a: x.transpose(*a) * torch.arange(4.0), [(0, 1), (1, 2), (0, 2)], (4, 4, 4)),
    "sum": (lambda x, a: (x * x).sum(a), [0, 1, (0, 2)], (4, 4, 4)),
    "roll": (lambda x, a: x.roll(a, 0) * torch.arange(64.0).view(4, 4, 4), [0, 1, 3], (4, 4, 4)),
    "narrow": (lambda x, a: x.narrow(0, a, 2) ** 2, [0, 1, 2], (4, 4)),
    "select": (lambda x, a: x.select(1, a) ** 2, [0, 1, 3], (4, 4)),
    "slice": (lambda x, a: x[slice(*a)] ** 2, [(0, 4, 1), (1, 3, 1), (0, 4, 2)], (4, 4)),
    "pad": (lambda x, a: F.pad(x, a).cumsum(0) ** 2, [(1, 1), (2, 0), (0, 0)], (4, 4)),
    "topk": (lambda x, a: x.topk(a)[0] ** 2, [1, 2, 3], (4, 4)),
    "repeat": (lambda x, a: x.repeat(a) ** 2, [(1, 1), (2, 1), (1, 2)], (4, 4)),
    "convolution": (
        lambda x, a: F.conv2d(x, torch.ones(4, 4 // a[3], 3, 3), None, *a),
        [(1, 0, 1, 1), (2, 1, 1, 1), (1, 2, 2, 1), (1, 1, 1, 4)],
        (2, 4, 8, 8),
    ),
    "pooling": (lambda x, a: F.avg_pool2d(x, *a) ** 2, [(2,), (3, 1, 1), (2, 2, 1)], (2, 4, 8, 8)),
    "interpolate": (
        lambda x, a: F.interpolate(x, scale_factor=a, mode="bilinear") ** 2,
        [2.0, 1.5, 0.5],
        (2, 4, 8, 8),
    ),
    "interpolation mode": (
        lambda x, a: F.interpolate(x, size=(5, 5), mode=a) ** 2,
        ["nearest", "bicubic", "area"],
        (2, 4, 8, 8),
    ),
    "epsilon": (lambda x, a: F.layer_norm(x, (4,), eps=a) ** 3, [1e-5, 0.1, 1.0], (4, 4)),
    "approximate": (lambda x, a: F.gelu(x, approximate=a), ["none", "tanh", "none"], (4, 4)),
    "reduction": (lambda x, a: F.mse_loss(x, x.detach().sin(), reduction=a), ["mean", "sum", "none"], (4, 4)),
    "cross entropy": (
        lambda x, a: F.cross_entropy(x, torch.arange(4), **a),
        [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"label_smoothing": 0.3}, {"ignore_index": 2}],
        (4, 4),
    ),
    "embedding": (
        lambda x, a: F.embedding(torch.tensor([[0, 1], [1, 2]]), x, a[0], scale_grad_by_freq=a[1]) ** 2,
        [(None, False), (1, False), (None, True), (0, False)],
        (4, 4),
    ),
    "indices": (lambda x, a: x[torch.tensor(a)] ** 2, [[0, 1], [2, 3], [0, 1, 2]], (4, 4)),
    "mask": (lambda x, a: x[x > a] ** 2, [0.0, 0.5, -0.5], (4, 4)),
    "beta and alpha": (
        lambda x, a: torch.addmm(x, x, x, beta=a[0], alpha=a[1]),
        [(1, 1), (2, 1), (0.5, 3)],
        (4, 4),
    ),
    "bounds": (
        lambda x, a: x.clamp(**a) ** 2,
        [{"min": 0.0}, {"max": 0.5}, {"min": -0.3, "max": 0.2}],
        (4, 4),
    ),
    "split": (lambda x, a: x.split(a)[0] ** 2, [4, 1, 2, 3, 4], (4, 4)),
    "second piece": (lambda x, a: x.split(a)[1] ** 2, [1, 2, 3, 2], (6, 4)),
    "unsafe split": (lambda x, a: torch.unsafe_split(x, a, -1)[0] ** 2, [1, 2, 3], (4, 4)),
    "split with sizes": (lambda x, a: x.split(a)[0] ** 2, [[1, 3], [2, 2], [1, 1, 2]], (4, 4)),
    "unbind": (lambda x, a: x[:a].unbind()[1] ** 2, [2, 3, 4, 2], (4, 4)),
    "unbind the last": (lambda x, a: x[:, :a].unbind(-1)[0] ** 2, [3, 4, 1], (4, 4)),
    "causal": (
        lambda x, a: F.scaled_dot_product_attention(x, x, x, **a),
        [{}, {"is_causal": True}, {"scale": 0.1}, {"scale": 0.5}],
        (2, 4, 8, 8),
    ),
    "batch norm": (
        lambda x, a: F.batch_norm(x, torch.zeros(4), torch.ones(4), training=a[0], eps=a[1]) ** 3,
        [(True, 1e-5), (False, 1e-5), (True, 0.1)],
        (2, 4, 8),
    ),
    "dtype": (lambda x, a: x.to(a).float() ** 2, [torch.float64, torch.bfloat16, torch.float16], (4, 4)),
}


@pytest.mark.parametrize("compiler", [keep, flat])
@pytest.mark.parametrize("name", list(SETTINGS))
def test_gradients_follow_the_settings(name: str, compiler: Any) -> None:
    function, settings, shape = SETTINGS[name]

    def gradients() -> list[torch.Tensor | None]:
        found = []
        for setting in settings:
            torch.manual_seed(0)
            x = torch.randn(shape, requires_grad=True)
            y = function(x, setting)
            (y * torch.arange(1, y.numel() + 1, dtype=y.dtype).view(y.shape)).sum().backward()
            found.append(x.grad)
        return found

    expected = gradients()
    compiled_autograd.reset()
    with compiled_autograd.enable(compiler):
        first, second = gradients(), gradients()
    torch.testing.assert_close(first, expected)
    torch.testing.assert_close(second, expected)
