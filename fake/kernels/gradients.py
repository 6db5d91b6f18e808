"""Gradients whose strides depend on whether autograd sees a tensor subclass.

A few autograd formulas in C++ check for a dispatch mode or a tensor subclass and then compute the same values
in another way (``isTensorSubclassLike`` in ``FunctionsManual.cpp``: no data-dependent branches, no writes
into fresh tensors). For inputs that are not row-major, the two ways give different strides. A rule for an
operator cannot see this. But the autograd node that is running can be queried, and at one operator of each
formula the final strides in eager are known.

Nothing is changed during tracing: what runs later are the traced operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fake.kernels.outputs import contiguous_strides
from fake.seam.autograd_engine import autograd_node_type, saved_tensor
from fake.seam.dispatch import OpOverload
from fake.seam.fake_tensor import FakeTensorMode

_aten = torch.ops.aten

STRIDE_DECIDING_OPS = frozenset(
    (
        _aten.mul.Tensor,
        _aten.view.default,
        _aten.unsqueeze.default,
        _aten.cat.default,
        _aten.tril.default,
        _aten.masked_fill.Scalar,
    )
)
"""The operators that determine the strides of a formula's result."""

StrideRule = Callable[[FakeTensorMode, OpOverload, Any, Any, torch.Tensor], Any]


def _extreme_strides(
    mode: FakeTensorMode, func: OpOverload, node: Any, args: Any, result: torch.Tensor
) -> Any:
    """``evenly_distribute_backward``: eager fills a row-major tensor; subclasses multiply by the mask."""
    return contiguous_strides(result.shape) if func is _aten.mul.Tensor else None


def _product_strides(
    mode: FakeTensorMode, func: OpOverload, node: Any, args: Any, result: torch.Tensor
) -> Any:
    """``prod_backward`` of all elements: if none is zero, eager divides the product by the input."""
    self = saved_tensor(node, "self")
    if func is not _aten.view.default or self is None or self.shape != result.shape:
        return None
    with mode, torch.no_grad():
        return torch.div(self.new_empty(()), self).stride()


def _product_strides_along_dim(
    mode: FakeTensorMode, func: OpOverload, node: Any, args: Any, result: torch.Tensor
) -> Any:
    """Like ``_product_strides``, along a dimension. If its size is 1, subclasses return the incoming gradient."""
    self, product = saved_tensor(node, "self"), saved_tensor(node, "result")
    if self is None or product is None or self.shape != result.shape:
        return None
    dim = _reduced_dim(node)
    if func is _aten.mul.Tensor:
        gradient = args[0]
    elif func is _aten.unsqueeze.default and self.shape[dim] == 1:
        gradient = result
    else:
        return None
    with mode, torch.no_grad():
        products = product if node._saved_keepdim else product.unsqueeze(dim)
        return (gradient * (products / self)).stride()


def _reduced_dim(node: Any) -> int:
    """Return the reduced dimension, which is saved as an unsigned integer."""
    dim: int = node._saved_dim
    return dim if dim < 1 << 63 else dim - (1 << 64)


def _reflector_strides(
    mode: FakeTensorMode, func: OpOverload, node: Any, args: Any, result: torch.Tensor
) -> Any:
    """``householder_product_backward``: eager writes into zeros like the inputs; subclasses use ``cat``."""
    if func not in (_aten.cat.default, _aten.tril.default):
        return None
    saved = ("self", "input2") if type(node).__name__.startswith("Ormqr") else ("input", "tau")
    for like in (saved_tensor(node, name) for name in saved):
        if like is not None and like.shape == result.shape:
            with mode, torch.no_grad():
                return torch.empty_like(like).stride()
    return None


def _clamp_strides(mode: FakeTensorMode, func: OpOverload, node: Any, args: Any, result: torch.Tensor) -> Any:
    """``clamp_backward`` of torch 2.15: eager fills ``where``'s result in place, subclasses out of place."""
    return args[0].stride() if func is _aten.masked_fill.Scalar and args[0].shape == result.shape else None


FORMULAS: dict[type, StrideRule] = {
    kind: rule
    for name, rule in {
        "MaxBackward1": _extreme_strides,
        "MinBackward1": _extreme_strides,
        "MedianBackward0": _extreme_strides,
        "NanmedianBackward0": _extreme_strides,
        "ProdBackward0": _product_strides,
        "ProdBackward1": _product_strides_along_dim,
        "LinalgHouseholderProductBackward0": _reflector_strides,
        "OrmqrBackward0": _reflector_strides,
        "ClampBackward0": _clamp_strides,
    }.items()
    if (kind := autograd_node_type(name)) is not None
}
"""By node type: the strides that eager gives to an operator's result, or None to keep the operator's own."""


def eager_strides(mode: FakeTensorMode, func: OpOverload, node: Any, args: Any, result: torch.Tensor) -> Any:
    """Return the strides that ``result`` would have if ``node``'s formula had taken eager's path.

    Args:
        node: the autograd node that is running.
        result: the result of a watched operator.

    Returns:
        The strides, or ``None`` to keep those of ``result``.
    """
    rule = FORMULAS.get(type(node))
    return None if rule is None else rule(mode, func, node, args, result)
