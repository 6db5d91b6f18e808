"""Data-parallel training under ``enable``: the C++ reducer runs in eager with a reason, the Python one is captured."""

from __future__ import annotations

import copy
import datetime
import os
import tempfile
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import compiled_autograd

WORLD = 2


def _train(rank: int, reducer: Any, rendezvous: str, results: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch._dynamo.config.optimize_ddp = reducer
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=60),
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    # Eager always has the C++ reducer.
    with torch._dynamo.config.patch(optimize_ddp=False):
        eager = DistributedDataParallel(copy.deepcopy(model))
    captured = DistributedDataParallel(copy.deepcopy(model))
    for step in range(2):
        torch.manual_seed(10 * rank + step)
        x = torch.randn(3, 4)
        eager.zero_grad()
        captured.zero_grad()
        eager(x).pow(2).sum().backward()
        with compiled_autograd.enable(lambda graph: graph):
            captured(x).pow(2).sum().backward()
        for mine, theirs in zip(captured.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    stats = compiled_autograd.stats()
    torch.save((stats.captures + stats.hits, stats.fallback_reasons), f"{results}.{rank}")
    distributed.barrier()
    # The reducer's destructor, which holds the GIL, may wait for a thread of gloo that wants it: torch hangs there
    # once in a while, with or without us.
    os._exit(0)


@pytest.mark.slow
@pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available(),
    reason="needs torch.distributed with gloo",
)
@pytest.mark.parametrize("reducer", ["ddp_optimizer", "python_reducer"])
def test_gradients_are_averaged_as_in_eager(reducer: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = os.path.join(folder, "results")
        torch.multiprocessing.spawn(
            _train, (reducer, os.path.join(folder, "rendezvous"), results), nprocs=WORLD
        )
        for rank in range(WORLD):
            captured, reasons = torch.load(f"{results}.{rank}")
            if reducer == "python_reducer":
                assert (captured, reasons) == (2, {})
            else:
                assert captured == 0
                assert [count for reason, count in reasons.items() if "DDP Reducer" in reason] == [2]
