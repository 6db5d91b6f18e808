"""Tensor parallel models are compiled with symbolic sizes: what torch's own trace of them ends in is a RecursionError."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def local(value):
    return value.to_local() if hasattr(value, "to_local") else value


@pytest.mark.slow
def test_another_length_is_compiled_with_symbolic_sizes(mesh):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    options = {"compiler": "eager", "cache": "off", "ranks": "off"}
    compiled = torch.compile(model, backend="fxpasses", options=options)
    for length in (3, 2, 5):
        x = torch.randn(2, length, 8)
        found = []
        for run in (model, compiled):
            model.zero_grad()
            out = run(x)
            out.square().mean().backward()
            found.append([local(value) for value in (out, *(p.grad for p in model.parameters()))])
        torch.testing.assert_close(found[1], found[0])
