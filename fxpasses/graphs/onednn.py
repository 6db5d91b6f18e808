"""Matmuls by oneDNN, whatever library torch itself uses for them.

``fxpasses::onednn_matmul`` multiplies matrices. ``fxpasses::onednn_pixelwise`` is a convolution with a
one-pixel kernel, and ``fxpasses::onednn_pixelwise_weight`` is the gradient of its weight.

Torch's own x86 builds use MKL for float32, with and without compilation. Which library is faster depends on
the processor. The oneDNN kernel is the one that Inductor calls for the linear layers of frozen models. It
reads weights and gradients of any strides, so it can be used in training, too.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fake.seam.dispatch import onednn_linear

_library = torch.library.Library("fxpasses", "FRAGMENT")
_library.define("onednn_matmul(Tensor a, Tensor b, Tensor? bias) -> Tensor")

onednn_matmul = torch.ops.fxpasses.onednn_matmul.default
"""``a @ b`` plus ``bias`` added to each row, for float32 matrices on the CPU."""


def has_onednn() -> bool:
    """Whether this torch build has oneDNN and may use it."""
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)  # type: ignore[attr-defined]


def _on_cpu(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return onednn_linear(a, b.t(), bias)


def _on_meta(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


_library.impl("onednn_matmul", _on_cpu, "CPU")
_library.impl("onednn_matmul", _on_meta, "Meta")

_library.define("onednn_pixelwise(Tensor x, Tensor weight, Tensor? bias, Tensor like) -> Tensor")
_library.define("onednn_pixelwise_weight(Tensor grad, Tensor x) -> Tensor")

onednn_pixelwise = torch.ops.fxpasses.onednn_pixelwise.default
"""Convolves ``x[n, c, h, w]`` with ``weight[o, c, 1, 1]``: a matmul of pixels. The result has the layout of
``like``, whose data is not read."""

onednn_pixelwise_weight = torch.ops.fxpasses.onednn_pixelwise_weight.default
"""The gradient of the weight, from the gradient of the result and ``x``."""


def _pixels(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def _pixelwise_on_cpu(x: Tensor, weight: Tensor, bias: Tensor | None, like: Tensor) -> Tensor:
    n, _, h, w = x.shape
    result = onednn_linear(_pixels(x), weight.flatten(1), bias)
    return result.view(n, h, w, -1).permute(0, 3, 1, 2).contiguous(memory_format=_format(like))


def _pixelwise_on_meta(x: Tensor, weight: Tensor, bias: Tensor | None, like: Tensor) -> Tensor:
    n, _, h, w = x.shape
    size = (n, weight.shape[0], h, w)
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=_format(like))


def _format(x: Tensor) -> torch.memory_format:
    is_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if is_last else torch.contiguous_format


def _pixelwise_weight_on_cpu(grad: Tensor, x: Tensor) -> Tensor:
    product = _on_cpu(_pixels(grad).t(), _pixels(x), None)
    return product.as_strided((*product.shape, 1, 1), _pixelwise_weight_on_meta(grad, x).stride())


def _pixelwise_weight_on_meta(grad: Tensor, x: Tensor) -> Tensor:
    size = (grad.shape[1], x.shape[1], 1, 1)
    return torch.empty(size, dtype=x.dtype, device="meta", memory_format=_format(x))


_library.impl("onednn_pixelwise", _pixelwise_on_cpu, "CPU")
_library.impl("onednn_pixelwise", _pixelwise_on_meta, "Meta")
_library.impl("onednn_pixelwise_weight", _pixelwise_weight_on_cpu, "CPU")
_library.impl("onednn_pixelwise_weight", _pixelwise_weight_on_meta, "Meta")


@register_flop_formula(torch.ops.fxpasses.onednn_matmul)
def _flops(a: tuple[int, int], b: tuple[int, int], *more: Any, **named: Any) -> int:
    """FLOPs of a matmul. Without this formula, FLOP counters treat the call as free."""
    return 2 * a[0] * a[1] * b[1]


@register_flop_formula(torch.ops.fxpasses.onednn_pixelwise)
def _pixelwise_flops(x: tuple[int, ...], weight: tuple[int, ...], *more: Any, **named: Any) -> int:
    return 2 * math.prod(x) * weight[0]


@register_flop_formula(torch.ops.fxpasses.onednn_pixelwise_weight)
def _pixelwise_weight_flops(grad: tuple[int, ...], x: tuple[int, ...], **named: Any) -> int:
    return 2 * math.prod(x) * grad[1]
