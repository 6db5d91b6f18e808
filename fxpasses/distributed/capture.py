"""Capture the graphs of one rank of many, in one process that does not communicate."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
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
from fxpasses.pipeline.capture_graphs import Captured, capture

TRACED_RANKS = 64
"""Maximum traced size of a mesh dimension. Larger ones are traced as if sharded over this many ranks."""


def capture_rank(
    make: Callable[..., tuple[Any, tuple[Any, ...]]],
    mesh: Mapping[str, int],
    memory_budget: float | None = None,
    observers: Sequence[Observer] = (),
) -> tuple[Captured, dict[str, Group]]:
    """Capture the graphs of rank 0 of a mesh, on fake tensors, at a cost independent of the mesh size.

    The process group does nothing.

    Args:
        make: returns a model and a tuple of one rank's inputs. It is passed the mesh if it has a parameter
            without a default, or of that name, and must then distribute the model itself (hooks of
            ``fully_shard`` are read as gathers in the graph); else :func:`~fxpasses.distributed.shard` does.
            It runs under a fake mode, so nothing is allocated.
        mesh: names and sizes of the dimensions, innermost last. Dimensions above :data:`TRACED_RANKS` are
            traced with that many ranks.
        memory_budget: as in :class:`~fxpasses.Options`.
        observers: as for :func:`fxpasses.capture`.

    Returns:
        The capture, and the process groups in their real size, by their names in the graphs.

    Raises:
        SimulationError: if a process group already exists, the mesh is empty or has more dimensions than
            parameters can be sharded over, or ``make`` has two parameters, returns something else, or makes a
            ``DistributedDataParallel``.
        CaptureError: if the model cannot be captured.
        ShardingError: if the model cannot be sharded.
    """
    if dist.is_initialized():
        raise SimulationError("this process has a process group: simulate in a process of its own")
    if not mesh or any(type(size) is not int or size < 1 for size in mesh.values()):
        raise SimulationError(f"expected a mesh of sizes of at least 1, got {dict(mesh)}")
    distributes = _takes_mesh(make)
    if not distributes and len(mesh) > 2:
        raise SimulationError(
            f"the mesh has {len(mesh)} dimensions, and parameters are sharded over one, or over two (replicas, shards): "
            f"give {_name(make)} a parameter, the mesh, and let it distribute the model itself"
        )
    sizes = [min(size, TRACED_RANKS) for size in mesh.values()]
    with _torch.silent_process_group(math.prod(sizes)):
        traced = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=tuple(mesh))
        groups: dict[str, Group] = {}
        stride = 1
        for name in reversed(list(mesh)):
            groups[str(traced.get_group(name).group_name)] = Group(mesh[name], stride, name)
            stride *= mesh[name]
        with FakeTensorMode(allow_non_fake_inputs=True):
            with _torch.skip_trunc_normal(), _torch.real_meshes(), _torch.convert_fakes_in_place():
                model, inputs = _call_make(make, *[traced] * distributes)
            if not distributes:
                model = shard(model, traced)
            elif isinstance(model, nn.Module) and is_fully_sharded(model):
                model = shard(model)  # otherwise its hooks would be missing in the graphs
            return capture(
                model,
                *inputs,
                passes=["default"],
                memory_budget=memory_budget,
                dynamic=False,
                observers=observers,
            ), groups


def _takes_mesh(make: Callable[..., Any]) -> bool:
    """Whether a function takes the mesh: it has a parameter without a default, or of that name."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = [
        p
        for p in inspect.signature(make).parameters.values()
        if (p.default is p.empty or p.name == "mesh") and p.kind not in kinds
    ]
    if len(parameters) > 1 or any(p.kind is p.KEYWORD_ONLY for p in parameters):
        names = ", ".join(p.name for p in parameters)
        raise SimulationError(
            f"{_name(make)} wants {names}: it is given the mesh, as one positional argument, or nothing"
        )
    return bool(parameters)


def _call_make(make: Callable[..., Any], *mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    """Call ``make`` and return the model and its inputs."""
    try:
        made = make(*mesh)
    except RuntimeError as error:
        source = inspect.getfile(nn.parallel.DistributedDataParallel)
        if not any(frame.filename == source for frame in traceback.extract_tb(error.__traceback__)):
            raise
        raise SimulationError(
            f"{_name(make)} makes a DistributedDataParallel, which wants real tensors: give it a parameter, the mesh, and "
            'return shard(model, mesh, {"*": None}), inputs, which reduces the same gradients in the graph'
        ) from error
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (None, None)
    if not callable(model) or not isinstance(inputs, tuple | torch.Tensor):
        raise SimulationError(
            f"{_name(make)} has to return a pair, the model and a tuple of its inputs; it returned {made!r:.200}"
        )
    return model, inputs if isinstance(inputs, tuple) else (inputs,)


def _name(make: Callable[..., Any]) -> str:
    return getattr(make, "__name__", repr(make))
