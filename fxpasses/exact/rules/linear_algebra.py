"""Determinants, inverses and linear systems, by elimination in each field, which rounds nothing.

The signs of factors made of roots (those of Cholesky) are undetermined, as those of any root: what is
multiplied or divided by them twice is exact if squares of roots are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpasses.exact.arithmetic import Arithmetic
from fxpasses.exact.dual import Dual
from fxpasses.exact.rules.table import named, rule

aten = torch.ops.aten
_MAX_ROWS = 256
"""Rows of the largest matrix that is eliminated, in as many steps; larger ones are uninterpreted."""


def _solve_system(m: Arithmetic, a: Dual, b: Dual, witness: Tensor) -> Dual:
    """The unique solution of ``a @ x = b``, with a witness that LAPACK computed."""
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    residues = [
        m.field.solve(k, x.expand(*batch, *x.shape[-2:]), y.expand(*batch, *y.shape[-2:]))
        for k, (x, y) in enumerate(zip(a.residues, b.residues, strict=True))
    ]
    return m.assemble(witness, residues, dtype=b.dtype)


def _transposed(a: Dual) -> Dual:
    return a.map(lambda t: t.mT)


def _product(m: Arithmetic, a: Dual, b: Dual) -> Dual:
    return m.bilinear(torch.matmul, a, b)


def _identity(m: Arithmetic, like: Dual) -> Dual:
    return m.dual(torch.eye(like.shape[-1], dtype=torch.float64), like.dtype).map(
        lambda t: t.expand(like.shape)
    )


def _triangle(m: Arithmetic, a: Dual, upper: bool, unit: bool) -> Dual:
    """A triangle of a matrix, with its own diagonal or with ones on it."""
    cut = torch.triu if upper else torch.tril
    if not unit:
        return a.map(cut)
    return m.add(a.map(lambda t: cut(t, 1 if upper else -1)), _identity(m, a))


def _diagonal(a: Dual) -> Dual:
    return a.map(lambda t: t.diagonal(dim1=-2, dim2=-1))


def _lu_with_row_order(m: Arithmetic, a: Dual) -> tuple[Dual, Tensor, Tensor]:
    """Both triangular factors in one matrix, the pivots (by the witness), and the order of rows they make."""
    witness, pivots, _ = torch.linalg.lu_factor_ex(a.witness)
    order = torch.lu_unpack(witness, pivots, unpack_data=False)[0].argmax(-2)
    residues = [
        m.field.lu_factor(k, r.gather(-2, order.unsqueeze(-1).expand(r.shape)))
        for k, r in enumerate(a.residues)
    ]
    return m.assemble(witness, residues, dtype=a.dtype), pivots, order


def _determinant(m: Arithmetic, factors: Dual, order: Tensor) -> Dual:
    """The product of the diagonal, with the sign of the row order."""
    swaps = (order.unsqueeze(-1) > order.unsqueeze(-2)).triu().sum((-2, -1))
    return m.select(swaps % 2 == 0, _diagonal_product(m, factors), m.neg(_diagonal_product(m, factors)))


def _diagonal_product(m: Arithmetic, factors: Dual) -> Dual:
    products = m.cumprod(_diagonal(factors), -1)
    return products.map(lambda t: t[..., -1])


def _is_unsupported(a: Any) -> bool:
    return not isinstance(a, Dual) or a.shape[-1] > _MAX_ROWS or 0 in a.shape


@rule(aten._linalg_solve_ex)
def _solve(m: Arithmetic, op: Any, a: Dual, b: Dual, *, left: bool = True, check_errors: bool = False) -> Any:
    if _is_unsupported(a):
        return NotImplemented
    b = m.dual(b)
    witness, _, _, info = op(a.witness, b.witness, left=left, check_errors=check_errors)
    factors, pivots, _ = _lu_with_row_order(m, a)
    is_vector = b.dim() == 1 or (a.dim() - 1 == b.dim() and b.shape == a.shape[:-1])
    if is_vector:
        columns = b.map(lambda t: t.unsqueeze(-1))
        found = _solve_system(m, a, columns, witness.unsqueeze(-1)).map(lambda t: t.squeeze(-1))
    else:
        found = _solve_on_side(m, a, b, witness, left)
    return found, factors, pivots, info


def _solve_on_side(m: Arithmetic, a: Dual, b: Dual, witness: Tensor, left: bool) -> Dual:
    if left:
        return _solve_system(m, a, b, witness)
    return _transposed(_solve_system(m, _transposed(a), _transposed(b), witness.mT))


@rule(aten.linalg_lu_factor_ex)
def _lu_factor(m: Arithmetic, op: Any, a: Dual, *, pivot: bool = True, check_errors: bool = False) -> Any:
    if _is_unsupported(a) or not pivot or a.shape[-1] != a.shape[-2]:
        return NotImplemented
    factors, pivots, _ = _lu_with_row_order(m, a)
    return factors, pivots, op(a.witness, check_errors=check_errors)[2]


@rule(aten.lu_unpack)
def _lu_unpack(m: Arithmetic, op: Any, factors: Dual, pivots: Tensor, *wanted: bool) -> Any:
    if factors.shape[-1] != factors.shape[-2]:
        return NotImplemented
    orders, lower, upper = op(factors.witness, pivots, *wanted)
    has_data, has_orders = lower.numel() > 0, orders.numel() > 0
    return (
        m.dual(orders, factors.dtype) if has_orders else m.dual(orders),
        _triangle(m, factors, False, True) if has_data else m.dual(lower),
        _triangle(m, factors, True, False) if has_data else m.dual(upper),
    )


@rule(aten.linalg_lu_solve)
def _lu_solve(
    m: Arithmetic,
    op: Any,
    factors: Dual,
    pivots: Tensor,
    b: Dual,
    *,
    left: bool = True,
    adjoint: bool = False,
) -> Any:
    if _is_unsupported(factors):
        return NotImplemented
    b = m.dual(b)
    witness = op(factors.witness, pivots, b.witness, left=left, adjoint=adjoint)
    orders = torch.lu_unpack(factors.witness, pivots, unpack_data=False)[0]
    lower, upper = (_triangle(m, factors, is_upper, not is_upper) for is_upper in (False, True))
    a = _product(m, m.dual(orders), _product(m, lower, upper))
    return _solve_on_side(m, _transposed(a) if adjoint else a, b, witness, left)


@rule(aten.linalg_inv_ex)
def _inverse(m: Arithmetic, op: Any, a: Dual, *, check_errors: bool = False) -> Any:
    if _is_unsupported(a):
        return NotImplemented
    witness, info = op(a.witness, check_errors=check_errors)
    return _solve_system(m, a, _identity(m, a), witness), info


def _lu_and_determinant(m: Arithmetic, a: Dual) -> tuple[Dual, Tensor, Dual]:
    # LAPACK gets contiguous matrices transposed, and so do the gradients.
    factors, pivots, order = _lu_with_row_order(m, _transposed(a) if a.witness.is_contiguous() else a)
    return factors, pivots, _determinant(m, factors, order)


@rule(aten._linalg_det)
def _det(m: Arithmetic, op: Any, a: Dual) -> Any:
    if _is_unsupported(a):
        return NotImplemented
    factors, pivots, found = _lu_and_determinant(m, a)
    return m.with_witness(found, op(a.witness)[0]), factors, pivots


@rule(aten._linalg_slogdet)
def _slogdet(m: Arithmetic, op: Any, a: Dual) -> Any:
    if _is_unsupported(a):
        return NotImplemented
    sign, logarithm, *_ = op(a.witness)
    factors, pivots, found = _lu_and_determinant(m, a)
    size = m.select(found.witness < 0, m.neg(found), found)
    return m.from_witness(sign, found), m.with_witness(m.log(size), logarithm), factors, pivots


@rule(aten.linalg_solve_triangular)
def _solve_triangular(
    m: Arithmetic, op: Any, a: Dual, b: Dual, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    if _is_unsupported(a):
        return NotImplemented
    a, b = m.dual(a), m.dual(b)
    witness = op(a.witness, b.witness, upper=upper, left=left, unitriangular=unitriangular)
    return _solve_triangular_system(m, a, b, witness, upper, left, unitriangular)


def _solve_triangular_system(
    m: Arithmetic, a: Dual, b: Dual, witness: Tensor, upper: bool, left: bool, unit: bool
) -> Dual:
    if not left:
        return _transposed(
            _solve_triangular_system(m, _transposed(a), _transposed(b), witness.mT, not upper, True, unit)
        )
    a = _triangle(m, a, upper, unit)
    if upper or a.square is None:
        return _solve_system(m, a, b, witness)
    # Columns are multiples of those of a unit triangular matrix: in a Cholesky factor, by roots.
    roots = _diagonal(a)
    ones = m.div(a, roots.map(lambda t: t.unsqueeze(-2)))
    columns = roots.map(lambda t: t.unsqueeze(-1))
    found = m.div(_solve_system(m, ones, b, witness * columns.witness), columns)
    return m.with_witness(found, witness)


@rule(*named("triangular_solve"))
def _triangular_solve(
    m: Arithmetic, op: Any, b: Dual, a: Dual, upper: bool = True, transpose: bool = False, unit: bool = False
) -> Any:
    if _is_unsupported(a):
        return NotImplemented
    a, b = m.dual(a), m.dual(b)
    witness = op(b.witness, a.witness, upper, transpose, unit)[0]
    matrix = _transposed(a) if transpose else a
    return _solve_triangular_system(m, matrix, b, witness, upper != transpose, True, unit), a


@rule(aten.linalg_cholesky_ex)
def _cholesky(m: Arithmetic, op: Any, a: Dual, upper: bool = False, check_errors: bool = False) -> Any:
    if _is_unsupported(a):
        return NotImplemented
    a = m.dual(a)
    witness, info = op(a.witness, upper=upper, check_errors=check_errors)
    below = witness.mT if upper else witness
    symmetric = _transposed(a) if upper else a  # only its lower triangle is read
    symmetric = m.add(_triangle(m, symmetric, False, False), _transposed(symmetric.map(lambda t: t.tril(-1))))
    factors = [m.field.lu_factor(k, r) for k, r in enumerate(symmetric.residues)]
    squares = below.diagonal(dim1=-2, dim2=-1).square()
    diagonal = m.assemble(squares, [f.diagonal(dim1=-2, dim2=-1) for f in factors], dtype=a.dtype)
    scaled = below / below.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    ones = _triangle(m, m.assemble(scaled.nan_to_num(), factors, dtype=a.dtype), False, True)
    roots = m.sqrt(diagonal).map(lambda t: t.unsqueeze(-2))
    found = m.mul(ones, roots)
    found = Dual(below, found.residues, a.dtype, None, found.square)
    found = _transposed(found) if upper else found
    return found, info


def _matrix_of_cholesky(m: Arithmetic, factor: Dual, upper: bool) -> Dual:
    """The matrix that a Cholesky factor belongs to."""
    lower = _triangle(m, _transposed(factor) if upper else factor, False, False)
    roots = _diagonal(lower)
    ones = m.div(lower, roots.map(lambda t: t.unsqueeze(-2)))
    squares = m.squared(roots).map(lambda t: t.unsqueeze(-1))
    return _product(m, ones, m.mul(squares, _transposed(ones)))


@rule(aten.cholesky_solve)
def _cholesky_solve(m: Arithmetic, op: Any, b: Dual, factor: Dual, upper: bool = False) -> Any:
    if _is_unsupported(factor):
        return NotImplemented
    b = m.dual(b)
    return _solve_system(m, _matrix_of_cholesky(m, factor, upper), b, op(b.witness, factor.witness, upper))


@rule(aten.cholesky_inverse)
def _cholesky_inverse(m: Arithmetic, op: Any, factor: Dual, upper: bool = False) -> Any:
    if _is_unsupported(factor):
        return NotImplemented
    return _solve_system(
        m, _matrix_of_cholesky(m, factor, upper), _identity(m, factor), op(factor.witness, upper)
    )
