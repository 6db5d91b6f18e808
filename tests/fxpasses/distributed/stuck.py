"""A job of two processes that both get stuck.

One of them skips a backward pass that both have run before, or makes one more call.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fxpasses.distributed import answering, shard, watching

answering.STUCK_AFTER = watching.STUCK_AFTER = watching._EAGER_STUCK_SECONDS = 0.5
watching._GRACE = 0.2
dist.init_process_group("gloo")
model = shard(nn.Linear(8, 8), init_device_mesh("cpu", (2,)))
run = torch.compile(model, backend="fxpasses", options={"compiler": "eager"})
leaves_out = sys.argv[1] == "backward"
for step in range(3):
    loss = run(torch.ones(2, 8)).sum()
    if not leaves_out or step != 1 or dist.get_rank() == 0:
        loss.backward()
if dist.get_rank() == 1:
    run(torch.ones(2, 8))
dist.barrier()
