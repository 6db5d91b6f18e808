"""The gathers of equal layers are traced once, and stand in the graph as if each had been traced."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxpasses.compiling.observing import Observer
from fxpasses.compiling.options import Options
from fxpasses.distributed import shard
from fxpasses.pipeline.compile_graph import compile_graph
from fxpasses.pipeline.stages import Participants
from fxpasses.regional import gathers


class Seen(Observer):
    """What the joint graph calls but views, and how many pieces of memory its gathers make."""

    def joint(self, gm):
        calls = [node for node in gm.graph.nodes if node.op == "call_function"]
        self.targets = sorted(str(node.target) for node in calls if "view" not in str(node.target))
        gathered = [node.meta["val"] for node in calls if "all_gather" in str(node.target)]
        self.memory = len({value.untyped_storage()._cdata for value in gathered})


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_graphs_are_those_of_gathers_traced_one_by_one(mesh, monkeypatch, needs_gradient):
    blocks = (nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()) for _ in range(6))
    model = shard(nn.Sequential(*blocks), mesh)
    operators, seen = [], []

    def inline(gm, original=gathers.inline_gathers):
        operators.append(sum("region_forward" in str(node.target) for node in gm.graph.nodes))
        original(gm)

    monkeypatch.setattr("fxpasses.pipeline.compile_graph.inline_gathers", inline)

    def backend(gm, inputs):
        return compile_graph(
            gm, inputs, Options.parse({"compiler": "eager"}), Participants(observers=[seen[-1]])
        )

    for fewest in (8, 1000):
        monkeypatch.setattr(gathers, "_MIN_CALLS_SAVED", fewest)
        seen.append(Seen())
        torch._dynamo.reset()
        with torch.set_grad_enabled(needs_gradient):
            torch.compile(model, backend=backend, fullgraph=True)(torch.randn(2, 6))
    assert max(operators) >= 5
    if needs_gradient:
        assert seen[0].targets == seen[1].targets
        assert seen[0].memory == seen[1].memory == 24
