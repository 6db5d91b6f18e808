"""The graphs of one rank of many, captured in one process that talks to nobody."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fxpasses._torch import FakeTensorMode
from fxpasses.compiling.observing import Observer
from fxpasses.distributed import _torch
from fxpasses.distributed.fully_sharded import is_fully_sharded
from fxpasses.distributed.sharding import shard
from fxpasses.distributed.simulate import Group
from fxpasses.errors import SimulationError
from fxpasses.pipeline.capture import Captured, capture

TRACED_RANKS = 64
"""The largest size of a dimension of the mesh that is traced: what is sharded over more ranks counts as sharded over so many."""


def capture_rank(
    make: Callable[..., tuple[Any, tuple[Any, ...]]],
    mesh: Mapping[str, int],
    memory_budget: float | None = None,
    observers: Sequence[Observer] = (),
) -> tuple[Captured, dict[str, Group]]:
    """Capture the graphs of rank 0 of a mesh, on fake tensors and a process group that does nothing: what that costs does not depend on its size.

    Args:
        make: returns a model and a tuple of its inputs, which are one rank's. It is given the mesh if it has a parameter, and then
            distributes the model itself (hooks of ``fully_shard`` are read as gathers in the graph); else :func:`~fxpasses.distributed.shard` does. It runs under a fake mode: nothing is allocated.
        mesh: names and sizes of the dimensions, the innermost last. Dimensions above :data:`TRACED_RANKS` are traced with that many ranks.
        memory_budget: as in :class:`~fxpasses.Options`.
        observers: as of :func:`fxpasses.capture`.

    Returns:
        The capture, and by the names that the graphs give them the groups as large as they will be.

    Raises:
        SimulationError: a process group exists already, the mesh is empty, or ``make`` returns something else.
        CaptureError: the model cannot be captured.
        ShardingError: the model cannot be sharded.
    """
    if dist.is_initialized():
        raise SimulationError("this process has a process group: simulate in a process of its own")
    if not mesh or any(type(size) is not int or size < 1 for size in mesh.values()):
        raise SimulationError(f"expected a mesh of sizes of at least 1, got {dict(mesh)}")
    sizes = [min(size, TRACED_RANKS) for size in mesh.values()]
    with _torch.silent_process_group(math.prod(sizes)):
        traced = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=tuple(mesh))
        groups: dict[str, Group] = {}
        stride = 1
        for name in reversed(list(mesh)):
            groups[str(traced.get_group(name).group_name)] = Group(mesh[name], stride, name)
            stride *= mesh[name]
        with FakeTensorMode(allow_non_fake_inputs=True):
            distributes = bool(inspect.signature(make).parameters)
            made = make(traced) if distributes else make()
            if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
                raise SimulationError(
                    f"{getattr(make, '__name__', make)} has to return a pair, the model and a tuple of its inputs; it returned {made!r:.200}"
                )
            model = made[0]
            if not distributes:
                model = shard(model, traced)
            elif isinstance(model, nn.Module) and is_fully_sharded(model):
                model = shard(model)  # its hooks would not be in the graphs
            inputs = made[1] if isinstance(made[1], tuple) else (made[1],)
            return capture(
                model,
                *inputs,
                passes=["default"],
                memory_budget=memory_budget,
                dynamic=False,
                observers=observers,
            ), groups
