"""``fxpasses::onednn_matmul``: a matmul of matrices by oneDNN, whatever library torch itself takes for matmuls.

torch's own builds for x86 take MKL for float32, with and without compilation. Which of the two is faster depends on the processor.
oneDNN's kernel is the one that Inductor calls for the linear layers of frozen models; it reads weights and gradients of any strides, so training can have it, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fake.seam.dispatch import onednn_linear

_library = torch.library.Library("fxpasses", "FRAGMENT")
_library.define("onednn_matmul(Tensor a, Tensor b, Tensor? bias) -> Tensor")

onednn_matmul = torch.ops.fxpasses.onednn_matmul.default
"""``a @ b``, and ``bias`` added to each row: float32 matrices on the CPU."""


def has_onednn() -> bool:
    """Whether this torch was built with it, and may use it."""
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)  # type: ignore[attr-defined]


def _on_cpu(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return onednn_linear(a, b.t(), bias)


def _on_meta(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


_library.impl("onednn_matmul", _on_cpu, "CPU")
_library.impl("onednn_matmul", _on_meta, "Meta")


@register_flop_formula(torch.ops.fxpasses.onednn_matmul)
def _flops(a: tuple[int, int], b: tuple[int, int], *more: Any, **named: Any) -> int:
    """Of a matmul: without it whoever counts FLOPs takes the call for one that is free."""
    return 2 * a[0] * a[1] * b[1]
