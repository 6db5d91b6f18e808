"""Drafts of schedules: what they say of a graph is what the clock says of that which the passes make of it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce, reduce_scatter_tensor
from torch.distributed.device_mesh import init_device_mesh

import fxpasses
from fxpasses.distributed import shard
from fxpasses.distributed.draft import Draft, Sheet
from fxpasses.distributed.network import Cluster
from fxpasses.distributed.schedule import Schedule
from fxpasses.distributed.simulate import Group, simulate_graph
from fxpasses.graphs.rewriting import copy_graph

pytestmark = pytest.mark.usefixtures("fake_group")

CLUSTERS = (
    Cluster(local=1, latency=8e-3, bandwidth=2e8, flops=5e10, memory_bandwidth=1e10),
    Cluster(local=1, latency=1e-5, bandwidth=1e9, flops=1e12, memory_bandwidth=1e11),
)
SCHEDULES = [
    Schedule(bucket, ahead * (bucket or 1000))
    for bucket in (0, 500, 2000, 8000, 1 << 20)
    for ahead in (0, 1, 2, 8)
]


class Recurrent(nn.Module):
    """Weights that are used again, of uneven sizes, with dropout between."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer, self.norm = nn.Embedding(9, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.out = nn.Linear(8, 9)
        self.out.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for _ in range(3):
            x = x + nn.functional.dropout(self.layer(self.norm(x)).relu(), 0.1)
        return self.out(x)


def _convolutions():
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(64, 5))


def _sums(a, b, c):
    """What is sent next needs what came; some sums are returned as they are."""
    first, second = (all_reduce(value * 2, "sum", dist.group.WORLD) for value in (a, b))
    third = all_reduce(first.sin(), "sum", dist.group.WORLD)
    part = reduce_scatter_tensor(c + second.sum(), "avg", 0, dist.group.WORLD)
    return first, third.cos(), part, all_reduce(part * 3, "max", dist.group.WORLD)


def _captured(kind):
    mesh = init_device_mesh("cpu", (2,))
    if kind == "sums":
        return fxpasses.capture(_sums, torch.ones(6), torch.ones(4), torch.ones(8))
    model, inputs = {
        "recurrent": (Recurrent(), torch.ones(2, 3, dtype=torch.long)),
        "convolutions": (_convolutions(), torch.ones(2, 3, 8, 8)),
    }[kind]
    return fxpasses.capture(shard(model, mesh), inputs, passes=["default"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["recurrent", "convolutions", "sums"])
def test_a_draft_is_what_the_passes_make(kind):
    captured = _captured(kind)
    groups = {dist.group.WORLD.group_name: Group(2)}
    for gm in filter(None, (captured.forward, captured.backward)):
        for cluster in CLUSTERS:
            sheet = Sheet(gm.graph, cluster, groups)
            for schedule in SCHEDULES:
                drafted = Draft(sheet).scheduled(schedule.bucket_bytes, schedule.ahead_bytes)
                made = copy_graph(gm)
                for item in schedule.passes():
                    item.apply(made)
                expected = simulate_graph(made, cluster, groups)
                for name in ("seconds", "compute", "network", "exposed"):
                    assert getattr(drafted, name) == pytest.approx(getattr(expected, name)), (schedule, name)
                for name in ("messages", "peak_bytes", "input_bytes"):
                    assert getattr(drafted, name) == getattr(expected, name), (schedule, name)
