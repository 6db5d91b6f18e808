"""Composites that no mode sees: with symbolic sizes they answer as in eager, and real tensors do not notice."""

from __future__ import annotations

import pytest
import torch

from benchmarks.conformance.compare import Verdict, compare
from benchmarks.conformance.engines import active, make_mode, to_fake
from benchmarks.conformance.observe import observe

COV = {
    "plain": {},
    "no correction": {"correction": 0},
    "frequencies": {"fweights": torch.tensor([1, 2, 1, 3, 1])},
    "weights": {"aweights": torch.tensor([0.5, 1.0, 2.0, 0.1, 1.0])},
    "both": {"fweights": torch.tensor([1, 2, 1, 3, 1]), "aweights": torch.ones(5), "correction": 2},
}

INTO = {
    "norm": (torch.linalg.norm, [(4, 5)]),
    "norm of an order": (lambda x, **k: torch.linalg.norm(x, 1, **k), [(4, 5)]),
    "matrix norm": (lambda x, **k: torch.linalg.matrix_norm(x, "nuc", **k), [(3, 4, 5)]),
    "inner": (torch.inner, [(4, 5), (3, 5)]),
    "kron": (torch.kron, [(2, 3), (4, 5)]),
    "tensordot": (lambda x, y, **k: torch.tensordot(x, y, 1, **k), [(2, 3), (3, 5)]),
    "multi_dot": (lambda x, y, **k: torch.linalg.multi_dot([x, y], **k), [(2, 3), (3, 5)]),
    "vecdot": (torch.linalg.vecdot, [(4, 5), (4, 5)]),
    "ndtr": (torch.special.ndtr, [(4, 5)]),
    "unbind_copy": (lambda x, out: torch.unbind_copy(x, out=[out, torch.zeros(5)]), [(2, 5)]),
    "cond": (torch.linalg.cond, [(3, 4, 4)]),
}


def agrees(call, *given, symbolic=True):
    expected = observe(call(*given))
    mode = make_mode("fake", symbolic=symbolic)
    inputs = to_fake(mode, given)
    with active(mode):
        found = observe(call(*inputs))
    outcome = compare(expected, found)
    assert outcome.verdict is Verdict.OK, outcome.detail


@pytest.mark.parametrize("symbolic", [True, False])
@pytest.mark.parametrize("name", COV)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64])
def test_cov(name, symbolic, dtype):
    weights = list(COV[name])

    def call(x, *values):
        return torch.cov(x, **dict(zip(weights, values, strict=True)))

    agrees(call, torch.ones(3, 5).to(dtype), *COV[name].values(), symbolic=symbolic)


@pytest.mark.parametrize("name", COV)
def test_the_graph_of_cov_computes_eagers_values(name):
    x = torch.randn(3, 5)
    compiled = torch.compile(lambda x: torch.cov(x, **COV[name]), backend="aot_eager")
    assert torch.allclose(compiled(x), torch.cov(x, **COV[name]), rtol=1e-5)
    torch._dynamo.reset()


def test_cov_refuses_what_eager_refuses():
    for wrong in (torch.ones(4), torch.ones(5, 1)):
        with pytest.raises(RuntimeError):
            torch.cov(torch.ones(3, 5), aweights=wrong)
        mode = make_mode("fake", symbolic=True)
        x, weights = to_fake(mode, (torch.ones(3, 5), wrong))
        with active(mode), pytest.raises(RuntimeError, match=r"cov\(\)"):
            torch.cov(x, aweights=weights)


@pytest.mark.parametrize("out", [(2,), (0,), (3, 3, 3)])
@pytest.mark.parametrize("name", INTO)
def test_out_of_composites(name, out):
    call, shapes = INTO[name]
    agrees(lambda *given: call(*given[:-1], out=given[-1]), *map(torch.ones, shapes), torch.zeros(out))


def test_real_tensors_go_to_torch():
    out = torch.zeros(0)
    assert torch.linalg.norm(torch.ones(3, 4), out=out) is out
    assert torch.allclose(torch.cov(torch.eye(3)), torch.eye(3) / 2 - 1 / 6)
