"""A job of three processes that wait for each other in a circle, in groups of two.

Each process prints the error that it gets as JSON.
"""

import json

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce

from fxpasses.distributed import gate
from fxpasses.errors import RankMismatchError

gate.ASK_AFTER, gate.STUCK_AFTER = 0.2, 0.4
dist.init_process_group("gloo")
groups = [dist.new_group(sorted({rank, (rank + 1) % 3})) for rank in range(3)]


def step(x):
    return all_reduce(x * 2, "sum", groups[dist.get_rank()])


try:
    torch.compile(step, backend="fxpasses", options={"compiler": "eager"})(torch.ones(3))
except RankMismatchError as error:
    print(json.dumps({"ranks": error.ranks, "groups": error.values}), flush=True)
dist.barrier()  # rank 0 holds the store that the others read the error from
