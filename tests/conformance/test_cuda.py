"""The engine against eager on a GPU: torch's own samples, on its device."""

import pytest
import torch

from benchmarks.conformance import Options, Verdict, sweep
from benchmarks.conformance.errors import ConformanceOptionsError
from benchmarks.conformance.known import is_known


@pytest.mark.gpu
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("shard", range(8))
def test_sampled_operators_agree_with_eager(shard, symbolic):
    tables = ("forward",) if symbolic else ("forward", "backward", "in-place")
    options = Options(
        engine="fake",
        device="cuda",
        symbolic=symbolic,
        samples=2,
        shard=(shard, 8),
        tables=tables,
        databases=("op", "module"),
    )
    found = sweep(options).with_verdict(Verdict.MISMATCH, Verdict.UNSUPPORTED, Verdict.ERROR)
    assert [
        f"{case.label} {case.group}: {case.outcome.detail}" for case in found if not is_known(case, "cuda")
    ] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what is said without a CUDA device")
def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ConformanceOptionsError, match="no CUDA device"):
        Options(device="cuda")
    with pytest.raises(ConformanceOptionsError, match="did you mean 'cuda'"):
        Options(device="cude")
