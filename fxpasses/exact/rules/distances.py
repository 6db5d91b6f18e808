"""Distances of points, norms of normalized rows, and their gradients."""

from __future__ import annotations

from typing import Any

import torch

from fxpasses.exact.arithmetic import Arithmetic
from fxpasses.exact.dual import Dual
from fxpasses.exact.rules.table import rule

aten = torch.ops.aten
_SUPPORTED_P = (1.0, 2.0)


def _norm(m: Arithmetic, difference: Dual, p: float) -> Dual:
    """The norms over the last dimension."""
    if p == 1.0:
        difference = m.select(difference.witness < 0, m.neg(difference), difference)
        return m.sum(difference, [difference.dim() - 1])
    return m.sqrt(m.sum(m.mul(difference, difference), [difference.dim() - 1]))


def _norm_backward(m: Arithmetic, grad: Dual, difference: Dual, p: float, norm: Dual) -> Dual:
    """The gradients of the norms by their arguments; zero where the norm is, as in the kernels."""
    grad, norm = (value.map(lambda t: t.unsqueeze(-1)) for value in (grad, m.dual(norm)))
    if p == 1.0:
        return m.mul(grad, m.from_witness(difference.witness.sign(), difference))
    return m.select(norm.witness == 0, 0, m.div(m.mul(grad, difference), norm)).as_type(
        difference.dtype or torch.float32
    )


def _pairwise_differences(m: Arithmetic, a: Dual, b: Dual) -> Dual:
    return m.sub(a.map(lambda t: t.unsqueeze(-2)), m.dual(b).map(lambda t: t.unsqueeze(-3)))


@rule(aten._cdist_forward)
def _cdist(m: Arithmetic, op: Any, a: Dual, b: Dual, p: float, mode: Any) -> Any:
    return _norm(m, _pairwise_differences(m, m.dual(a), b), p) if p in _SUPPORTED_P else NotImplemented


@rule(aten._cdist_backward)
def _cdist_backward(m: Arithmetic, op: Any, grad: Dual, a: Dual, b: Dual, p: float, found: Dual) -> Any:
    if p not in _SUPPORTED_P:
        return NotImplemented
    grads = _norm_backward(m, m.dual(grad), _pairwise_differences(m, m.dual(a), b), p, found)
    return m.sum(grads, [grads.dim() - 2])


@rule(aten._pdist_forward)
def _pdist(m: Arithmetic, op: Any, a: Dual, p: float = 2.0) -> Any:
    first, second = torch.triu_indices(len(a.witness), len(a.witness), 1)
    difference = m.sub(a.map(lambda t: t[first]), a.map(lambda t: t[second]))
    return _norm(m, difference, p) if p in _SUPPORTED_P else NotImplemented


@rule(aten._pdist_backward)
def _pdist_backward(m: Arithmetic, op: Any, grad: Dual, a: Dual, p: float, found: Dual) -> Any:
    if p not in _SUPPORTED_P:
        return NotImplemented
    a = m.dual(a)
    first, second = torch.triu_indices(len(a.witness), len(a.witness), 1)
    difference = m.sub(a.map(lambda t: t[first]), a.map(lambda t: t[second]))
    grads = _norm_backward(m, m.dual(grad), difference, p, found)
    return m.linear(
        lambda t: t.new_zeros(a.shape).index_add(0, first, t).index_add(0, second, t, alpha=-1), grads
    )


@rule(aten._weight_norm_interface_backward)
def _weight_norm_backward(
    m: Arithmetic, op: Any, grad: Dual, direction: Dual, size: Dual, norms: Dual, dim: int
) -> tuple[Dual, Dual]:
    direction, size, norms = m.dual(direction), m.dual(size), m.dual(norms)
    others = [d for d in range(direction.dim()) if d != dim % direction.dim()]
    along = m.div(m.sum(m.mul(grad, direction), others, True), norms)
    across = m.sub(grad, m.mul(direction, m.div(along, norms)))
    return m.mul(m.div(size, norms), across), along.as_type(size.dtype or torch.float32)
