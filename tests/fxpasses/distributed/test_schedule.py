"""A pass that schedules the collectives of the graph it is given by simulating it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fxpasses
from fxpasses.distributed import schedule, shard
from fxpasses.distributed.network import Cluster
from fxpasses.distributed.schedule import ScheduleCollectives
from fxpasses.distributed.simulate import Group, simulate_graph, with_passes

FAR = Cluster(local=1, latency=1e-2, bandwidth=1e9, flops=1e12, memory_bandwidth=1e12, launch=0.0)
"""What a message takes is its latency."""
WIDTH = 64
WEIGHT = WIDTH * WIDTH * 4


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    monkeypatch.setattr(schedule, "ranks_of", lambda group: [0, 1])
    yield
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x):
        return x + self.second(self.first(x).sin().exp().cos())


def _model(layers=4):
    return shard(nn.Sequential(*(Block() for _ in range(layers))), init_device_mesh("cpu", (2,)))


def _scheduled(cluster):
    """How many gathers and reductions the graphs of four blocks have after the pass."""
    captured = fxpasses.capture(_model(), torch.randn(2, WIDTH), passes=["default"])
    captured = with_passes(captured, [ScheduleCollectives(cluster)])
    graphs = (captured.forward.graph, captured.backward.graph)
    names = [[str(node.target) for node in graph.nodes] for graph in graphs]
    return [sum("all_gather" in n or "reduce_scatter" in n for n in half) for half in names]


def test_far_ranks_get_one_message():
    assert _scheduled(FAR) == [1, 1]


def test_near_ranks_get_what_was_written():
    """A bucket copies, and saves nothing here."""
    near = Cluster(local=1, latency=0.0, bandwidth=1e15, flops=1e12, memory_bandwidth=1e9, launch=0.0)
    assert _scheduled(near) == [8, 8]


def test_what_does_not_fit_into_memory_is_not_chosen():
    """All eight weights at once are too many for this device."""
    forward, _ = _scheduled(Cluster(**{**vars(FAR), "memory": 8 * WEIGHT}))
    assert forward > 1


class Watch:
    """Simulates the forward graph that it sees."""

    def __init__(self, cluster):
        self.found = []

        @fxpasses.graph_pass(graphs=["forward"])
        def watch(gm):
            "Simulate."
            groups = {dist.group.WORLD.group_name: Group(2)}
            if len(gm.graph.find_nodes(op="placeholder")) > 4:  # not that of a region
                self.found.append(simulate_graph(gm, cluster, groups))
            return False

        self.passes = [watch]


def test_a_region_takes_as_long_as_its_calls():
    found = {}
    for regions in ("off", "always"):
        torch._dynamo.reset()
        watch = Watch(FAR)
        options = {"compiler": "eager", "regions": regions, "passes": watch.passes, "ranks": "off"}
        compiled = torch.compile(_model(), backend="fxpasses", options=options)
        compiled(torch.randn(512, WIDTH))
        found[regions] = watch.found[-1]
    assert found["off"].messages == found["always"].messages == 8
    assert found["always"].compute == pytest.approx(found["off"].compute, rel=0.05)
