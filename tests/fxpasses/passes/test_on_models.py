"""All library passes together, on models of many kinds: results and gradients agree with eager."""

import pytest
import torch

import fxpasses
from fxpasses.backend import fxpasses as backend
from fxpasses.passes import (
    ChunkLogits,
    DowncastSavedActivations,
    PackDropoutRng,
    PackSavedMasks,
    default_passes,
    library,
)
from tests.models.support import assert_agrees
from tests.models.test_transformers import MODELS, LossAndLogits
from tests.models.zoo import ZOO

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SMALL = {
    "chunk_logits": ChunkLogits(chunks=2, min_elements=8),
    "pack_saved_masks": PackSavedMasks(min_elements=8),
}


def all_passes():
    """Every pass that keeps results, with thresholds that small models reach."""
    own = {item.name for item in default_passes()} | {DowncastSavedActivations.name, PackDropoutRng.name}
    return ["default", *(SMALL.get(name, name) for name in library() if name not in own), "default"]


def compile(model, dynamic=False):
    options = {"passes": all_passes(), "compiler": "eager"}
    return torch.compile(model, backend=backend, options=options, dynamic=dynamic)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_zoo(name):
    entry = ZOO[name]
    assert_agrees(entry.build(), compile, [entry.inputs(4)])


@pytest.mark.parametrize("name", ["gpt", "convnet", "mixture_of_experts"])
def test_zoo_with_symbolic_sizes(name):
    entry = ZOO[name]
    assert_agrees(entry.build(), lambda m: compile(m, dynamic=True), [entry.inputs(4), entry.inputs(6)])
    assert fxpasses.stats().recompiles == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama", "vit"])
def test_transformers(name):
    build, inputs = MODELS[name]
    batch = inputs(2)
    model = LossAndLogits(build().train(), tuple(batch))
    assert_agrees(model, compile, [tuple(batch.values())])


@pytest.mark.parametrize("name", ["gpt", "encoder_decoder", "relative"])
def test_inference(name):
    entry = ZOO[name]
    assert_agrees(
        entry.build().eval(), lambda m: torch.no_grad()(compile(m)), [entry.inputs(4)], backward=False
    )
