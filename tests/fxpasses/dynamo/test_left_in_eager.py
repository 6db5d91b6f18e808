"""A function that Dynamo leaves in eager is said, once, with the reason."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fxpasses


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_loop_that_cannot_be_traced_is_said_once(caplog):
    @torch._dynamo.disable
    def opaque(x):
        return x + 1

    def function(x):
        for _ in range(2):
            x = opaque(x.sin())
        return x

    fxpasses.reset_stats()
    with caplog.at_level(logging.WARNING, logger="fxpasses"):
        run = torch.compile(function, backend="fxpasses", options={"compiler": "eager"})
        for size in (2, 3, 4):
            x = torch.randn(size)
            assert torch.equal(run(x), function(x))
    (found,) = fxpasses.stats().fallbacks
    assert found.stage == "dynamo"
    assert found.location.endswith(", function")
    assert "loop" in found.reason
    assert "x = opaque(x.sin())" in found.reason
    assert len([record for record in caplog.records if "runs in eager" in record.message]) == 1


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("name", ["Sequential", "Checkpointed", "DistributedDataParallel"])
def test_a_model_of_which_nothing_is_compiled_is_said(name, one_process, caplog, tmp_path):
    linear = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    if name == "DistributedDataParallel":
        model = DistributedDataParallel(linear)
    else:
        model = linear if name == "Sequential" else Checkpointed()
        for layer in model.layers if name == "Checkpointed" else ():
            fully_shard(layer, mesh=one_process)
        fully_shard(model, mesh=one_process)
    fxpasses.reset_stats()
    x = torch.randn(2, 4)
    with caplog.at_level(logging.WARNING, logger="fxpasses"):
        run = torch.compile(model, backend="fxpasses", options={"compiler": "eager", "cache": str(tmp_path)})
        run(x)
        with torch.no_grad():
            run(x)
    assert fxpasses.stats().graphs == 0
    (found,) = (fallback for fallback in fxpasses.stats().fallbacks if "nothing" in fallback.reason)
    assert found.location.endswith(name)
    assert len([record for record in caplog.records if "nothing that it calls" in record.message]) == 1


def test_a_model_of_which_a_part_is_compiled_is_not_said(one_process, tmp_path):
    class Inner(nn.Linear):
        def forward(self, x):
            return super().forward(x).sin()

    model = fully_shard(nn.Sequential(Inner(4, 4)), mesh=one_process)
    fxpasses.reset_stats()
    run = torch.compile(model, backend="fxpasses", options={"compiler": "eager", "cache": str(tmp_path)})
    for _ in range(2):
        run(torch.randn(2, 4)).sum().backward()
    assert fxpasses.stats().graphs == 1
    assert not fxpasses.stats().fallbacks
