"""The value check raises no alarm on the library's passes over models of the transformers library."""

from __future__ import annotations

import pytest
import torch

import fxpasses
from fxpasses.passes import library

transformers = pytest.importorskip("transformers", reason="needs the 'models' extra: pip install .[models]")

from tests.models.test_transformers import MODELS, LossAndLogits  # noqa: E402  (needs transformers)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_whole_library(name):
    build, inputs = MODELS[name]
    batch = inputs(2)
    model = build().train()
    if name == "llama":
        model.model.layers = model.model.layers[:1]  # what passes change in two, they change in one
    model = LossAndLogits(model, tuple(batch))
    fxpasses.reset_stats()
    options = {"compiler": "eager", "check": "values", "passes": list(library())}
    loss, _ = torch.compile(model, backend="fxpasses", options=options)(*batch.values())
    loss.backward()
    assert not fxpasses.stats().fallbacks
    assert len(fxpasses.stats().pass_changes) >= 3
