"""A deterministic sample of the sweep. The whole of it is the command's: ``python -m benchmarks.conformance``."""

import pytest

from benchmarks.conformance import Options, Verdict, sweep
from benchmarks.conformance.known import is_known

FINDINGS = (Verdict.MISMATCH, Verdict.UNSUPPORTED, Verdict.ERROR)

#: Operators of every family that has rules; torch's own engine fails on most of them.
FAMILIES = (
    "fft.ifft", "fft.irfft2", "linalg.qr", "linalg.lu_factor", "linalg.solve", "geqrf", "ormqr", "sort", "cat",
    "copysign", "floor_divide", "logaddexp", "logical_and", "where", "addbmm", "histogram", "arange", "linspace",
    "native_batch_norm", "nn.functional.layer_norm", "nn.functional.mse_loss", "nn.functional.max_unpool2d",
    "nn.functional.multilabel_margin_loss", "tensor_split", "nn.LSTM", "nn.MultiLabelMarginLoss",
)  # fmt: skip

ENGINE = "fake"


def _findings(options: Options) -> list[str]:
    tally = sweep(options)
    assert tally.count(Verdict.OK) > 50, "the sample is empty: have the databases' names changed?"
    return [
        f"{case.label} {case.group}: {case.outcome.detail}"
        for case in tally.with_verdict(*FINDINGS)
        if not is_known(case)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["given", "column-major", "sliced", "expanded"])
def test_the_families_with_rules_answer_like_eager(layout: str) -> None:
    assert _findings(Options(engine=ENGINE, patterns=FAMILIES, layouts=[layout], samples=2)) == []


@pytest.mark.slow
def test_the_families_with_rules_answer_like_eager_with_symbolic_sizes() -> None:
    tables = ("forward", "backward")
    assert _findings(Options(engine=ENGINE, patterns=FAMILIES, tables=tables, symbolic=True, samples=1)) == []


@pytest.mark.slow
def test_every_fifteenth_entry_answers_like_eager() -> None:
    options = Options(engine=ENGINE, layouts=["given", "column-major"], samples=1, shard=(7, 15))
    assert _findings(options) == []


def test_cached_answers_are_eagers_too() -> None:
    """The fake side runs twice; the second run is judged."""
    options = Options(
        engine=ENGINE, patterns=("add", "mm", "sort", "view", "nn.functional.linear"), samples=2, repeat=2
    )
    assert _findings(options) == []
