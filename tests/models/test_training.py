"""End to end: models of many kinds, trained through the backend, against eager."""

import pytest
import torch

from tests.models.support import assert_agrees
from tests.models.zoo import ZOO

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def compiled(**how):
    return lambda model: torch.compile(model, backend="fxpasses", **how)


def batches(name, sizes):
    return [ZOO[name].inputs(size) for size in sizes]


# Each model goes through Inductor once: with symbolic sizes, or with fixed ones. Convolutions and masked attention with symbolic
# sizes take Inductor several times as long; smaller ones are in the tests of regions, in `test_with_inductor.py`.
DYNAMIC = ("gpt", "many_outputs", "checkpointed")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ZOO if name not in DYNAMIC])
def test_inductor_static(name):
    assert_agrees(ZOO[name].build(), compiled(dynamic=False), batches(name, [3, 3]))


@pytest.mark.slow
@pytest.mark.parametrize("name", DYNAMIC)
def test_inductor_dynamic(name):
    assert_agrees(ZOO[name].build(), compiled(dynamic=True), batches(name, [3, 5, 2]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "autoencoder"])
def test_inductor_bfloat16(name):
    assert_agrees(ZOO[name].build(), compiled(), batches(name, [3]), dtype=torch.bfloat16)


# float32 with the sizes with which a model goes through Inductor is in the tests above; bfloat16 weights of the autocast model stay as
# they are: the same as the plain one.
STAGES = [
    *((name, torch.float32, name not in DYNAMIC) for name in ZOO),
    *((name, torch.bfloat16, False) for name in ZOO if name != "autocast"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "dynamic"), STAGES, ids=str)
def test_stages_before_inductor(name, dtype, dynamic):
    how = compiled(dynamic=dynamic, options={"compiler": "eager"})
    sizes = [3, 5, 3] if dynamic else [3, 3]
    assert_agrees(ZOO[name].build(), how, batches(name, sizes), dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "compiler"), [("convnet", "inductor"), ("gpt", "eager")])
def test_inference(name, compiler):
    model = ZOO[name].build().eval()
    with torch.no_grad():
        assert_agrees(model, compiled(options={"compiler": compiler}), batches(name, [3]), backward=False)


@pytest.mark.parametrize("budget", [0.0, 0.5])
@pytest.mark.parametrize("name", ["gpt", "convnet", "checkpointed"])
def test_memory_budget(name, budget):
    how = compiled(options={"compiler": "eager", "memory_budget": budget})
    assert_agrees(ZOO[name].build(), how, batches(name, [3]))
