"""A job of two processes, one of which is killed while it compiles.

The other one prints the error that it gets as JSON.
"""

import json
import os
import signal

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce

import fxpasses
from fxpasses.errors import RankMismatchError

dist.init_process_group("gloo")
RANK = dist.get_rank()
dist.barrier()


@fxpasses.graph_pass(graphs=["inference"])
def kills_rank_1(gm):
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return False


def step(x):
    return all_reduce(x * 2, "sum", dist.group.WORLD).sum()


options = {"compiler": "eager", "passes": [kills_rank_1]}
try:
    torch.compile(step, backend="fxpasses", options=options)(torch.ones(3))
except RankMismatchError as error:
    print(json.dumps({"error": str(error), "ranks": error.ranks}), flush=True)
