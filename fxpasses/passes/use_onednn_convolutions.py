"""Compute single-pixel float32 convolutions on the CPU with oneDNN instead of MKL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fake.seam.fx import size_hint
from fxpasses.graphs.onednn import has_onednn, onednn_pixelwise, onednn_pixelwise_weight
from fxpasses.graphs.rewriting import replace, same_metadata, value_of
from fxpasses.pass_manager.pass_base import Contract, Pass
from fxpasses.pass_manager.sites import claim
from fxpasses.passes._matching import calls_before, find_calls, is_float32_on_cpu
from fxpasses.passes._options import require_at_least

aten = torch.ops.aten

_CONV_ARGUMENTS = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
"""Stride, padding, dilation, transposed, output padding, groups."""


@dataclass(frozen=True)
class UseOnednnConvolutions(Pass):
    """Compute single-pixel convolutions of float32 CPU images with oneDNN, forward and backward.

    With one thread and fewer than 16 images, torch and Inductor compute them as an MKL matmul, unless weights
    are frozen. On processors on which MKL does not use all the hardware offers, oneDNN is up to twice as
    fast. :func:`fxpasses.tune` measures which is faster.

    Before::

        how = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
        y = aten.convolution(x, weight, bias, *how)               # weight: float32[64, 128, 1, 1]
        grads = aten.convolution_backward(grad_y, x, weight, [64], *how, [True, True, True])

    After::

        y = fxpasses.onednn_pixelwise(x, weight, bias, x)
        grad_x = fxpasses.onednn_pixelwise(grad_y, aten.permute(weight, [1, 0, 2, 3]), None, x)
        grad_weight = fxpasses.onednn_pixelwise_weight(grad_y, x)
        grad_bias = aten.sum(grad_y, [0, 2, 3])

    Sums are added in another order: equal up to rounding.

    Attributes:
        min_multiplications: smaller convolutions are left unchanged, as call overhead dominates their time.
    """

    name: ClassVar[str] = "use_onednn_convolutions"
    contract: ClassVar[Contract] = Contract(("forward", "backward", "inference"))
    min_multiplications: int = 1 << 20

    def __post_init__(self) -> None:
        require_at_least(self, min_multiplications=0)

    def apply(self, gm: fx.GraphModule) -> bool:
        if not has_onednn():
            return False
        changed = False
        for node in find_calls(gm.graph, aten.convolution.default):
            x, weight, bias, *how = node.args
            if self._is_profitable(x, weight, how, node.kwargs):
                changed |= _replace_results(node, [(node, onednn_pixelwise, x, weight, bias, x)])
        for node in find_calls(gm.graph, aten.convolution_backward.default):
            grad, x, weight, _, *how, _ = node.args
            if self._is_profitable(x, weight, how, node.kwargs) and is_float32_on_cpu(grad, 4):
                changed |= _replace_results(node, list(_gradients(node, grad, x, weight)))
        return changed

    def _is_profitable(self, x: Any, weight: Any, how: Any, named: Any) -> bool:
        if named or [list(v) if isinstance(v, (list, tuple)) else v for v in how] != list(_CONV_ARGUMENTS):
            return False
        if not (is_float32_on_cpu(x, 4) and is_float32_on_cpu(weight, 4)):
            return False
        of_x, of_weight = value_of(x).shape, value_of(weight).shape
        if tuple(of_weight[2:]) != (1, 1) or not statically_known_true(value_of(x).numel() > 0):
            return False
        n, channels, h, w = (size_hint(size) for size in of_x)
        return n * h * w * channels * size_hint(of_weight[0]) >= max(self.min_multiplications, 1)


def _gradients(node: fx.Node, grad: Any, x: Any, weight: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the gradients of a convolution that are used, each with the call that computes it."""
    for user in node.users:
        which = user.args[1]
        if which == 0:
            back = calls_before(user)(aten.permute.default, weight, [1, 0, 2, 3])
            yield user, onednn_pixelwise, grad, back, None, x
        elif which == 1:
            yield user, onednn_pixelwise_weight, grad, x
        else:
            yield user, aten.sum.dim_IntList, grad, [0, 2, 3]


def _replace_results(node: fx.Node, calls: Sequence[tuple[Any, ...]]) -> bool:
    """Replace the results of a convolution if all replacements have the same strides."""
    made = [(old, calls_before(old, like=old)(target, *args)) for old, target, *args in calls]
    fits = all(same_metadata(value_of(new), value_of(old)) for old, new in made)
    if not (fits and claim(node)):
        for _, new in made:
            given = new.all_input_nodes
            node.graph.erase_node(new)
            for view in given:
                if not view.users and view.op == "call_function":  # the transposed weight
                    node.graph.erase_node(view)
        return False
    for old, new in made:
        replace(old, new)
    return True
