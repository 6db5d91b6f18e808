"""A job of two processes, launched again: what it compiles then, and whether its results equal eager's.

``second_launch.py CACHE DIFFERENCE CASE...``: ``DIFFERENCE`` is how the second rank differs (``swap``,
``order``, ``no plans``, or ``nothing``). Each rank prints its findings as JSON.
"""

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import fxpasses
from fxpasses.distributed import shard

dist.init_process_group("gloo", timeout=timedelta(seconds=100))
RANK, WORLD = dist.get_rank(), dist.get_world_size()
CACHE, DIFFERENCE, *CASES = sys.argv[1:]
DIFFERS = RANK == 1 and DIFFERENCE
MESH, SOME = init_device_mesh("cpu", (WORLD,)), dist.new_group([0, 1])


def compiled(model, **options):
    return fxpasses.compile(model, cache="off" if DIFFERS == "no plans" else CACHE, **options)


def given(step, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(10 * step + RANK))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        self.seen += 1
        return x.square().mean()


def tensor_parallel(model):
    for block in model.blocks:
        parallelize_module(block, MESH, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def sequence_parallel(model):
    up, down = ColwiseParallel(input_layouts=Shard(0)), RowwiseParallel(output_layouts=Shard(0))
    for block in model.blocks:
        parallelize_module(block, MESH, {"norm": SequenceParallel(sequence_dim=0), "up": up, "down": down})


def gathered(model):
    shard(model, MESH, {"blocks.*.down.weight": 1, "blocks.*.norm.bias": None})


def read(model):
    for module in (*model.blocks, model):
        fully_shard(module, mesh=MESH)
    shard(model)


def read_over_tensor_parallel(model):
    """Both shard the same dimension: FSDP's placements are strided."""
    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("data", "tensor"))
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    shard(fully_shard(model, mesh=mesh["data"]))


def fully_sharded(model):
    """The hooks of FSDP2 run in Python around each block."""
    for module in (*model.blocks, model):
        fully_shard(module, mesh=MESH)


def in_low_precision(model):
    """The same, with hooks that cast what the model is given."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=MESH, mp_policy=policy)
    shard(model)


def data_parallel(model):
    """Its forward method, which changes it, runs in Python; the model inside is compiled."""
    return DistributedDataParallel(model)


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def trained(parallel, sizes=(4, 4, 4), grad=True):
    def run(how):
        torch.manual_seed(0)
        model = Model()
        model = parallel(model) or model
        step, results = how(model), []
        for number, size in enumerate(sizes):
            with torch.set_grad_enabled(grad):
                loss = step(given(0 if parallel is tensor_parallel else number, size, 12))
            if grad:
                loss.backward()
            results.append(loss.detach())
        results += [whole(p.grad).clone() for p in model.parameters() if grad]
        return [*results, *(buffer.clone() for buffer in model.buffers())]

    return run


def stepped(parallel):
    """Steps of an optimizer over sharded parameters."""

    def run(how):
        torch.manual_seed(0)
        model = Model()
        parallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        step = how(optimizer.step)
        for number in range(4):
            model(given(0 if parallel is tensor_parallel else number, 4, 12)).backward()
            step()
            optimizer.zero_grad()
        return [whole(parameter).detach() for parameter in model.parameters()]

    return run


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return all_reduce(x, "sum", dist.group.WORLD)

    @staticmethod
    def backward(ctx, gradient):
        return all_reduce(gradient, "sum", SOME)


class HoldsGroup(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.group = nn.Linear(12, 12), SOME

    def forward(self, x):
        return Summed.apply(all_gather_tensor(self.linear(x), 0, (MESH, 0)) * (1 + dist.get_rank())).sin()


def with_groups(how):
    torch.manual_seed(0)
    model = HoldsGroup()
    run = how(model)
    results = []
    for step in range(3):
        results.append(run(given(step, 4, 12)))
        results[-1].sum().backward()
    return [*results, model.linear.weight.grad]


def summed(x):
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def of_sizes(how):
    run = how(summed)
    return [run(torch.ones(size, 8) * RANK) for size in (3, 4, 5, 6)]


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.out = nn.Linear(12, 24), nn.Linear(24, 8)

    def forward(self, x):
        hidden = self.up(x).relu()
        return self.out(hidden), hidden, x.cos()


def sharded_results(grad):
    """Results that stay sharded, and are gathered for the loss."""

    def run(how):
        torch.manual_seed(0)
        head = Head()
        ways = {
            "up": ColwiseParallel(use_local_output=False),
            "out": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        }
        parallelize_module(head, MESH, ways)
        step, results = how(head), []
        for number in range(3):
            with torch.set_grad_enabled(grad):
                x = given(0, 4, 12).requires_grad_(grad)
                out, hidden, plain = step(x + number)
                assert out.placements == (Shard(0),)
                assert hidden.placements == (Shard(1),)
                if grad:
                    loss = plain.sum() + whole(out).square().mean()
                    loss = loss + hidden.redistribute(placements=[Replicate()]).to_local().sum()
                    loss.backward()
                    results.append(x.grad)
            results += [whole(out).detach(), whole(hidden).detach(), plain.detach()]
        return results + [whole(p.grad).clone() for p in head.parameters() if p.grad is not None]

    return run


def two_sums(a, b):
    a, b = a * 2, b * 3
    if DIFFERS == "swap":
        second = all_reduce(b, "sum", dist.group.WORLD)
        return all_reduce(a, "sum", dist.group.WORLD) - second
    first = all_reduce(a, "sum", dist.group.WORLD)
    return first - all_reduce(b, "sum", dist.group.WORLD)


def sums(how):
    run = how(two_sums)
    return [run(given(step, 4), given(step + 1, 4)) for step in range(3)]


def first(x):
    return all_reduce(x * 5, "sum", dist.group.WORLD)


def second(x):
    return all_reduce(x.sin(), "sum", dist.group.WORLD)


def in_turn(how):
    runs = [how(first), how(second)]
    return [run(given(0, 4)) for run in (runs[::-1] if DIFFERS == "order" else runs)]


RUN = {
    "tp": trained(tensor_parallel),
    "sp": trained(sequence_parallel),
    "gathered": trained(gathered),
    "gathered, no gradients": trained(gathered, grad=False),
    "gathered, sizes": trained(gathered, sizes=(4, 6, 8)),
    "read": trained(read),
    "read, over tp": trained(read_over_tensor_parallel),
    "read, bfloat16": trained(in_low_precision),
    "fsdp": trained(fully_sharded),
    "ddp": trained(data_parallel, sizes=(4, 4, 4, 4)),
    "steps of tp": stepped(tensor_parallel),
    "steps of gathered": stepped(gathered),
    "groups": with_groups,
    "sizes": of_sizes,
    "sums": sums,
    "in turn": in_turn,
    "sharded results": sharded_results(grad=True),
    "sharded results, no gradients": sharded_results(grad=False),
}

found = {}
for case in CASES:
    torch._dynamo.reset()
    fxpasses.reset_stats()
    expected = RUN[case](lambda model: model)
    try:
        actual = RUN[case](compiled)
    except fxpasses.RankMismatchError as error:
        found[case] = str(error)
        break
    tolerance = 3e-2 if "bfloat16" in case else 1e-5
    agree = all(torch.allclose(a, b, atol=tolerance) for a, b in zip(actual, expected, strict=True))
    stats = fxpasses.stats()
    found[case] = [agree, stats.graphs, stats.plans_used, stats.plans_refused]
print(json.dumps(found), flush=True)
