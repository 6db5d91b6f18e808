"""Matmuls and convolutions."""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fake.seam.dispatch import collectives
from fxpasses.exact.arithmetic import Arithmetic
from fxpasses.exact.dual import Dual
from fxpasses.exact.rules.table import named, rule

aten = torch.ops.aten


@rule(*named("mm bmm dot mv matmul outer ger vdot"))
def _matmul(m: Arithmetic, op: Any, a: Any, b: Any) -> Dual:
    return m.bilinear(op, m.dual(a), m.dual(b))


@rule(aten.addmm, aten.baddbmm, aten.addmv, aten.addbmm)
def _addmm(m: Arithmetic, op: Any, addend: Any, a: Any, b: Any, beta: Any = 1, alpha: Any = 1) -> Any:
    products: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
        aten.addmm: aten.mm.default,
        aten.baddbmm: aten.bmm.default,
        aten.addmv: aten.mv.default,
        aten.addbmm: lambda x, y: torch.bmm(x, y).sum(0),
    }
    product = m.bilinear(products[op.overloadpacket], m.dual(a), m.dual(b))
    return m.add(m.mul(addend, beta) if beta != 1 else addend, product, alpha)


@rule(aten._trilinear)
def _trilinear(m: Arithmetic, op: Any, a: Any, b: Any, c: Any, *how: Any, unroll_dim: int = 1) -> Any:
    # Each operand gets new dimensions of size 1; the product is summed over some dimensions.
    *added, summed = how[:4]
    operands = [m.dual(value) for value in (a, b, c)]
    letters = string.ascii_letters[: operands[0].dim() + len(added[0])]
    names = ["".join(at for i, at in enumerate(letters) if i not in new) for new in added]
    kept = "".join(at for i, at in enumerate(letters) if i not in summed)
    if not set(kept) <= set("".join(names)):
        return NotImplemented
    first, second, third = names
    between = "".join(at for at in letters if at in first + second and at in kept + third)
    inner, outer = f"{first},{second}->{between}", f"{between},{third}->{kept}"
    product = m.bilinear(lambda x, y: torch.einsum(inner, x, y), operands[0], operands[1])
    return m.bilinear(lambda x, y: torch.einsum(outer, x, y), product, operands[2])


def grouped_matmul(a: Tensor, b: Tensor, ends: Tensor | None) -> Tensor:
    """Products of groups of rows, of columns, or of the contracted dimension.

    Args:
        a: the left factors: one per group, or all of them concatenated.
        b: the right ones, likewise.
        ends: where groups end; ``None`` if each has its own factors.
    """
    if ends is None:
        return a @ b
    stops = [0, *ends.tolist()]
    parts = [slice(start, stop) for start, stop in itertools.pairwise(stops)]
    if a.dim() == 2 and b.dim() == 2:
        return torch.stack([a[:, part] @ b[part] for part in parts])
    if a.dim() == 2:
        rows = [a[part] @ b[group] for group, part in enumerate(parts)]
        return torch.cat([*rows, a.new_zeros(a.shape[0] - stops[-1], b.shape[-1])])
    columns = [a[group] @ b[:, part] for group, part in enumerate(parts)]
    return torch.cat([*columns, b.new_zeros(a.shape[1], b.shape[1] - stops[-1])], 1)


@rule(*named("_grouped_mm"))
def _grouped_mm(
    m: Arithmetic, op: Any, a: Dual, b: Dual, ends: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    if bias is not None:
        return NotImplemented
    ends = ends.witness.long() if isinstance(ends, Dual) else ends
    result = m.bilinear(lambda x, y: grouped_matmul(x, y, ends), m.dual(a), m.dual(b))
    return result if out_dtype is None else result.as_type(out_dtype)


@rule(aten.linear)
def _linear(m: Arithmetic, op: Any, a: Dual, weight: Dual, bias: Any = None) -> Dual:
    product = m.bilinear(lambda x, w: aten.linear.default(x, w), m.dual(a), m.dual(weight))
    return product if bias is None else m.add(product, bias)


@rule("fxpasses::onednn_matmul")
def _onednn_matmul(m: Arithmetic, op: Any, a: Any, b: Any, bias: Any) -> Dual:
    product = m.bilinear(aten.mm.default, m.dual(a), m.dual(b))
    return product if bias is None else m.add(product, bias)


@rule("fxpasses::onednn_pixelwise")
def _onednn_pixelwise(m: Arithmetic, op: Any, x: Any, weight: Any, bias: Any, like: Any) -> Dual:
    how = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    result = m.bilinear(lambda x, w: aten.convolution.default(x, w, None, *how), m.dual(x), m.dual(weight))
    return result if bias is None else m.add(result, m.dual(bias).map(lambda t: t.view(-1, 1, 1)))


@rule("fxpasses::onednn_pixelwise_weight")
def _onednn_pixelwise_weight(m: Arithmetic, op: Any, grad: Any, x: Any) -> Dual:
    pixels = lambda t: t.permute(0, 2, 3, 1).flatten(0, 2)  # noqa: E731
    product = m.bilinear(lambda g, x: torch.mm(pixels(g).t(), pixels(x)), m.dual(grad), m.dual(x))
    return product.map(lambda t: t[:, :, None, None])


@rule(aten.convolution)
def _convolution(m: Arithmetic, op: Any, a: Dual, weight: Dual, bias: Any, *how: Any) -> Dual:
    result = m.bilinear(lambda x, w: aten.convolution.default(x, w, None, *how), m.dual(a), m.dual(weight))
    if bias is None:
        return result
    size = [-1] + [1] * (len(how[0]) if isinstance(how[0], (list, tuple)) else result.dim() - 2)
    return m.add(result, m.dual(bias).map(lambda t: t.view(size)))


@rule(aten.convolution_backward)
def _convolution_backward(
    m: Arithmetic, op: Any, grad: Dual, a: Dual, weight: Dual, bias_sizes: Any, *how: Any
) -> tuple[Dual | None, Dual | None, Dual | None]:
    *settings, wanted = how
    a, weight = m.dual(a), m.dual(weight)
    no_input = torch.zeros(a.shape, dtype=torch.float64)
    no_weight = torch.zeros(weight.shape, dtype=torch.float64)

    def grad_input(g: Tensor, w: Tensor) -> Tensor:
        return op(g, no_input, w, bias_sizes, *settings, [True, False, False])[0]

    def grad_weight(g: Tensor, x: Tensor) -> Tensor:
        return op(g, x, no_weight, bias_sizes, *settings, [False, True, False])[1]

    return (
        m.bilinear(grad_input, grad, weight) if wanted[0] else None,
        m.bilinear(grad_weight, grad, a) if wanted[1] else None,
        m.sum(grad, [0, *range(2, grad.dim())]) if wanted[2] else None,
    )


def _time_last(t: Tensor) -> Tensor:
    return t.permute(1, 2, 0)


@rule(*named("conv_tbc"))
def _conv_tbc(m: Arithmetic, op: Any, a: Dual, weight: Dual, bias: Any, pad: int = 0) -> Dual:
    def convolved(x: Tensor, w: Tensor) -> Tensor:
        return torch.conv1d(_time_last(x), w.permute(2, 1, 0), padding=pad).permute(2, 0, 1)

    return m.add(m.bilinear(convolved, m.dual(a), m.dual(weight)), bias)


@rule(*named("conv_tbc_backward"))
def _conv_tbc_backward(
    m: Arithmetic, op: Any, grad: Dual, a: Dual, weight: Dual, bias: Any, pad: int
) -> tuple[Dual, Dual, Dual]:
    how = [1], [pad], [1], False, [0], 1
    no_input = torch.zeros(_time_last(a.witness).shape, dtype=torch.float64)
    no_weight = torch.zeros(weight.witness.permute(2, 1, 0).shape, dtype=torch.float64)

    def grad_input(g: Tensor, w: Tensor) -> Tensor:
        given = _time_last(g), no_input, w.permute(2, 1, 0)
        return aten.convolution_backward(*given, None, *how, [True, False, False])[0].permute(2, 0, 1)

    def grad_weight(g: Tensor, x: Tensor) -> Tensor:
        given = _time_last(g), _time_last(x), no_weight
        return aten.convolution_backward(*given, None, *how, [False, True, False])[1].permute(2, 1, 0)

    return (
        m.bilinear(grad_input, grad, m.dual(weight)),
        m.bilinear(grad_weight, grad, m.dual(a)),
        m.sum(grad, [0, 1]),
    )


@rule(*named("all_reduce", collectives))
def _all_reduce(m: Arithmetic, op: Any, a: Dual, how: str, group: Any) -> Any:
    # Each element depends on the elements at its place in all ranks. Only the reduction and the group are
    # known.
    if not isinstance(a, Dual):
        return NotImplemented
    return m.uninterpreted(f"all_reduce {how} {group}", a, a.witness * 2 if how == "sum" else a.witness)
