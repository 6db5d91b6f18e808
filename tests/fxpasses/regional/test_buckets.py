"""DDP's buckets end where layers do, and equal layers are compiled once, whatever bucket they are in."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fxpasses
from fxpasses.pipeline import compile_graph


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def job():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_buckets_are_whole_layers_and_one_is_compiled(job, monkeypatch):
    compiled, original = [], compile_graph._compile_region
    monkeypatch.setattr(
        compile_graph, "_compile_region", lambda *given: compiled.append(given) or original(*given)
    )
    model = Model()
    plain = DistributedDataParallel(copy.deepcopy(model))
    # A layer has 1,248 bytes: by bytes alone the first cuts were in the middle of layers.
    cut = DistributedDataParallel(model, bucket_cap_mb=700 / 2**20)
    torch._dynamo.reset()
    fxpasses.reset_stats()
    f = torch.compile(cut, backend="fxpasses", options={"compiler": "eager", "regions": "always"})
    x = torch.randn(2, 8)
    f(x).square().sum().backward()
    plain(x).square().sum().backward()
    for one, other in zip(cut.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    stats = fxpasses.stats()
    assert (len(compiled), stats.graphs, stats.region_calls) == (1, 5, 4), stats.region_reports
