"""Systems of linear equations, inverses, determinants and triangular factors are exact: their identities are proved, and what is none is not."""

from __future__ import annotations

import pytest
import torch
from torch import linalg
from torch.fx.experimental.proxy_tensor import make_fx

from fxpasses import capture
from fxpasses.exact import equivalent
from fxpasses.exact.fields import field


def positive(a):
    return a @ a.mT + torch.eye(a.shape[-1], dtype=a.dtype)


def factor(a):
    return linalg.cholesky_ex(positive(a)).L


SAME = {
    "an inverse": (lambda a, b: linalg.inv(a) @ b, linalg.solve),
    "one right side": (lambda a, b: linalg.solve(a, b[..., 0]), lambda a, b: (linalg.inv(a) @ b)[..., 0]),
    "from the right": (lambda a, b: linalg.solve(a.mT, b), lambda a, b: linalg.solve(a, b.mT, left=False).mT),
    "a product": (lambda a, b: a @ linalg.solve(a, b), lambda a, b: b),
    "factors": (linalg.solve, lambda a, b: linalg.lu_solve(*linalg.lu_factor_ex(a)[:2], b)),
    "unpacked factors": (
        lambda a, b: a @ b,
        lambda a, b: (
            torch.linalg.multi_dot([*torch.lu_unpack(*linalg.lu_factor_ex(a)[:2]), b])
            if a.dim() == 2
            else a @ b
        ),
    ),
    "a transposed determinant": (lambda a, b: linalg.det(a.mT), lambda a, b: linalg.det(a)),
    "a determinant of a product": (
        lambda a, b: linalg.det(a @ positive(a)),
        lambda a, b: linalg.det(a) * linalg.det(positive(a)),
    ),
    "a logarithm of a determinant": (
        lambda a, b: linalg.slogdet(positive(a))[1],
        lambda a, b: 2 * factor(a).diagonal(dim1=-2, dim2=-1).log().sum(-1),
    ),
    "a factor of Cholesky": (
        lambda a, b: linalg.solve(positive(a), b),
        lambda a, b: torch.cholesky_solve(b, factor(a)),
    ),
    "an inverse of a factor": (
        lambda a, b: linalg.inv(positive(a)) @ b,
        lambda a, b: torch.cholesky_inverse(factor(a).mT.contiguous(), upper=True) @ b,
    ),
    "a length in another metric": (
        lambda a, b: (b * linalg.solve(positive(a), b)).sum((-2, -1)),
        lambda a, b: linalg.solve_triangular(factor(a), b, upper=False).square().sum((-2, -1)),
    ),
    "a triangle": (
        lambda a, b: linalg.solve(a.triu(1) + torch.eye(3, dtype=a.dtype), b),
        lambda a, b: linalg.solve_triangular(a, b, upper=True, unitriangular=True),
    ),
}
OTHER = {
    "transposed": (linalg.solve, lambda a, b: linalg.solve(a.mT, b)),
    "the other factors": (
        linalg.solve,
        lambda a, b: linalg.lu_solve(*linalg.lu_factor_ex(a)[:2], b, adjoint=True),
    ),
    "a sign": (lambda a, b: linalg.det(a), lambda a, b: linalg.det(a[..., [1, 0, 2], :])),
    "half a logarithm": (
        lambda a, b: linalg.slogdet(positive(a))[1],
        lambda a, b: factor(a).diagonal(dim1=-2, dim2=-1).log().sum(-1),
    ),
    "an epsilon": (
        lambda a, b: linalg.solve(positive(a), b),
        lambda a, b: torch.cholesky_solve(b * (1 + 1e-5), factor(a)),
    ),
    "a diagonal": (
        lambda a, b: linalg.solve_triangular(a, b, upper=True),
        lambda a, b: linalg.solve_triangular(a, b, upper=True, unitriangular=True),
    ),
}


def graphs(functions, batch, dtype):
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(*batch, 3, n, generator=generator, dtype=dtype) for n in (3, 2))
    return [make_fx(f)(a, b) for f in functions], [a, b]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("name", SAME)
def test_identities_are_proved(name, batch, dtype):
    two, inputs = graphs(SAME[name], batch, dtype)
    assert equivalent(*two, inputs).kind == "EQUAL"


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("name", OTHER)
def test_other_functions_are_not(name, batch):
    two, inputs = graphs(OTHER[name], batch, torch.float64)
    assert equivalent(*two, inputs).kind in ("DIFFERENT", "APPROXIMATE")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ["an inverse", "a transposed determinant", "from the right"])
def test_gradients_are_proved_whatever_the_strides(name, transposed):
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(3, n, generator=generator, dtype=torch.float64) for n in (3, 2))
    a = (a.mT if transposed else a).requires_grad_()
    b.requires_grad_()
    # Inputs are in the order in which a function looks at them.
    before, after = (capture(lambda a, b, f=f: (a.shape, f(a, b))[1], a, b).joint for f in SAME[name])
    inputs = [torch.randn(n.meta["val"].shape) for n in before.graph.find_nodes(op="placeholder")]
    is_a = [n.meta["val"].shape == a.shape for n in before.graph.find_nodes(op="placeholder")]
    inputs = [a.detach() if of_a else value for of_a, value in zip(is_a, inputs, strict=True)]
    assert equivalent(before, after, inputs).kind == "EQUAL"


@pytest.mark.parametrize("level", [0, 1, 2])
def test_elimination_in_a_field(level):
    one = field(0)
    generator = torch.Generator().manual_seed(5)
    a = torch.randint(one.primes[level], (2, 5, 5), generator=generator)
    b = torch.randint(one.primes[level], (2, 5, 3), generator=generator)
    a[0, 0, 0] = 0  # another row has to come first
    x = one.solve(level, a, b)
    assert torch.equal(one.bilinear(level, torch.matmul, a, x), b)
    factors = one.lu_factor(level, a[1])
    lower, upper = factors.tril(-1) + torch.eye(5, dtype=torch.int64), factors.triu()
    assert torch.equal(one.bilinear(level, torch.matmul, lower, upper), a[1])
