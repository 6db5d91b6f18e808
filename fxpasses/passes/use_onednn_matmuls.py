"""Compute float32 matmuls on the CPU with oneDNN instead of MKL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fake.seam.fx import size_hint
from fxpasses.graphs.onednn import has_onednn, onednn_matmul
from fxpasses.graphs.rewriting import replace, same_metadata, value_of
from fxpasses.pass_manager.pass_base import Contract, Pass
from fxpasses.pass_manager.sites import claim
from fxpasses.passes._matching import calls_before, find_calls, is_float32_on_cpu
from fxpasses.passes._options import require_at_least

aten = torch.ops.aten


@dataclass(frozen=True)
class UseOnednnMatmuls(Pass):
    """Compute matmuls of float32 matrices on the CPU with oneDNN, forward and backward.

    Torch and Inductor use MKL for them, also for frozen weights. On processors on which MKL does not use all
    the hardware offers, oneDNN is up to twice as fast; on others it is not. :func:`fxpasses.tune` measures
    which is faster.

    Before::

        y = aten.addmm(bias, x, weight_t)            # float32[256, 1024]
        grad = aten.mm(grad_y_t, x)

    After::

        y = fxpasses.onednn_matmul(x, weight_t, bias)
        grad = fxpasses.onednn_matmul(grad_y_t, x, None)

    Sums are added in another order: equal up to rounding.

    Attributes:
        min_multiplications: smaller matmuls are left unchanged, as call overhead dominates their time.
        min_rows: matmuls with fewer rows are left unchanged, as they are memory-bound.
    """

    name: ClassVar[str] = "use_onednn_matmuls"
    contract: ClassVar[Contract] = Contract(("forward", "backward", "inference"))
    min_multiplications: int = 1 << 20
    min_rows: int = 16

    def __post_init__(self) -> None:
        require_at_least(self, min_multiplications=0, min_rows=0)

    def apply(self, gm: fx.GraphModule) -> bool:
        if not has_onednn():
            return False
        changed = False
        for node in find_calls(gm.graph, aten.mm.default, aten.addmm.default):
            bias, a, b = node.args if node.target is aten.addmm.default else (None, *node.args)
            if node.kwargs or not self._is_profitable(a, b) or not _is_bias(bias, node) or not claim(node):
                continue
            new = calls_before(node, like=node)(onednn_matmul, a, b, bias)
            assert same_metadata(value_of(new), value_of(node))
            replace(node, new)
            changed = True
        return changed

    def _is_profitable(self, a: Any, b: Any) -> bool:
        if not (is_float32_on_cpu(a, 2) and is_float32_on_cpu(b, 2) and _is_dense(value_of(b))):
            return False
        if not statically_known_true(value_of(b).shape[0] > 0):  # oneDNN raises for empty sums
            return False
        rows, inner, columns = (size_hint(n) for n in (*value_of(a).shape, value_of(b).shape[1]))
        return rows >= self.min_rows and rows * inner * columns >= max(self.min_multiplications, 1)


def _is_dense(value: Tensor) -> bool:
    """Whether a matrix is row-major or column-major without gaps, decided without guards."""
    return any(same_metadata(m, m.new_empty(m.shape)) for m in (value, value.t()))


def _is_bias(bias: Any, node: fx.Node) -> bool:
    if bias is None:
        return True
    value = value_of(bias)
    return (
        value.dim() == 1
        and value.dtype is torch.float32
        and same_metadata(value, value.new_empty(value_of(node).shape[1:]))
    )
