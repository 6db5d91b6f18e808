"""Operators on symbolic sizes: the guards accept no sizes that eager refuses, and the metadata are right at all others."""

import pytest
import torch

import fake
from tests.fake.symbols.operators import LESS, disagreement, samples

NAMES = (
    "as_strided", "amax", "argmin", "cat", "diagonal", "gather", "index_add", "index_reduce", "index_select", "masked_select", "max",
    "median", "nn.functional.adaptive_avg_pool3d", "nn.functional.conv_transpose1d", "nn.functional.pad", "select_scatter",
    "slice_scatter", "sort", "topk", "unfold",
)  # fmt: skip


@pytest.mark.parametrize("less", [0, LESS])
@pytest.mark.parametrize("name", NAMES)
def test_guards_accept_what_eager_accepts(name, less):
    found = list(samples(name, 2))
    assert found
    for label, sample in found:
        assert disagreement(sample, less=less) is None, label


def test_a_guard_that_is_missing_is_found(monkeypatch):
    monkeypatch.setattr("fake.dispatch.refusals.check_arguments", lambda *arguments: None)
    fake.FakeTensorMode.cache_clear()  # answers found with the checks bring their guards along
    try:
        problems = [disagreement(sample, less=LESS) for _, sample in samples("as_strided", 2)]
    finally:
        fake.FakeTensorMode.cache_clear()
    assert any("which eager refuses" in (problem or "") for problem in problems)


def test_samples_are_compared():
    assert any(isinstance(t, torch.Tensor) for _, sample in samples("topk", 2) for t in sample.tensors)
