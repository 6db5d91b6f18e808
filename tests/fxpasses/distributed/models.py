"""A job of two processes that trains models with several kinds of parallelism, compiled and in eager.

``models.py KIND...``: each kind takes two steps. Losses and gradients are compared, and each rank prints the
outcomes as JSON.
"""

import copy
import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fxpasses
from fxpasses.distributed import shard

dist.init_process_group("gloo", timeout=timedelta(seconds=100))
RANK, WORLD = dist.get_rank(), dist.get_world_size()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(x)).sin())


class Model(nn.Module):
    def __init__(self, vocabulary=16, layers=4, width=8):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def tensor_parallel(model, mesh):
    columns, rows = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel()), RowwiseParallel()
    for block in model.blocks:
        parallelize_module(block, mesh, {**columns, "out": rows, "down": rows})


def sequence_parallel(model, mesh):
    scattered = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel(input_layouts=Shard(1)))
    rows = RowwiseParallel(output_layouts=Shard(1))
    embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    parallelize_module(
        model,
        mesh,
        {"embed": embed, "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())},
    )
    for block in model.blocks:
        parallelize_module(block, mesh, {"norm": SequenceParallel(), **scattered, "out": rows, "down": rows})


def gathered(model, mesh):
    """Parameters are shards that are gathered where they are used."""
    shard(model, mesh, {"blocks.*.down.weight": 1, "blocks.*.norm.bias": None})


def read(model, mesh):
    """A model of FSDP2, read as such."""
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    shard(model)


KINDS = {"tp": tensor_parallel, "sp": sequence_parallel, "gathered": gathered, "read": read}
SHARDED = ("gathered", "read")

AROUND = {"tp": 5, "sp": 15, "gathered": 5, "read": 5}
"""The calls before the first layer and after the last."""


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def averaged(parameter):
    """The gradient: of one that every process holds whole, the mean of theirs, which a shard has already."""
    gradient = whole(parameter.grad).clone()
    if not isinstance(parameter, DTensor):
        dist.all_reduce(gradient)
        gradient /= WORLD
    return gradient


def train(model, run, same_data):
    found = []
    for step in range(2):
        torch.manual_seed(10 * step + (0 if same_data else RANK))
        loss = run(torch.randint(0, 15, (2, 6)))
        loss.backward()
        found += [whole(loss).detach(), *(averaged(p) for p in model.parameters())]
        model.zero_grad()
    return found


def _error(actual, expected):
    return max((a - b).abs().max().item() for a, b in zip(actual, expected, strict=True))


found = {}
for kind in sys.argv[1:]:
    torch._dynamo.reset()
    fxpasses.reset_stats()
    torch.manual_seed(0)
    model = Model(15 if kind in SHARDED else 16)  # uneven shards
    plain = copy.deepcopy(model)
    KINDS[kind](model, init_device_mesh("cpu", (WORLD,)))
    expected = train(plain, plain, kind not in SHARDED)
    eager = train(model, model, kind not in SHARDED)
    options = {"compiler": "eager", "regions": "always"}
    compiled = torch.compile(model, backend="fxpasses", options=options)
    actual = train(model, compiled, kind not in SHARDED)
    (report,) = fxpasses.stats().region_reports
    found[kind] = {
        "error": _error(actual, expected),
        "eager": _error(eager, expected),
        "regions": [(item.copies, item.calls) for item in report.taken],
        "layer_calls": report.calls - AROUND[kind],
    }
print(json.dumps(found), flush=True)
