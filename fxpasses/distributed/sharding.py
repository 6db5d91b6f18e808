"""Shard parameters, and gather them where they are used, in the graph, where passes see it."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parameter import is_lazy

from fxpasses.distributed.agreement import agree_on_shards
from fxpasses.distributed.answering import Answering
from fxpasses.distributed.fully_sharded import convert_fully_sharded, is_fully_sharded
from fxpasses.distributed.gathering import Gather, gather_in_graph
from fxpasses.errors import ShardingError


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    plan: Mapping[str, int | None] | None = None,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Shard the parameters of a model over the processes of a mesh, in place.

    A parameter becomes a DTensor of which each process holds one part. Where a module reads it
    (``self.weight``), it gets the gathered whole tensor. In the backward pass the gradient is averaged over
    the processes and scattered. Both are calls in the compiled graph, not hooks. Optimizers, ``state_dict``,
    ``torch.distributed.checkpoint`` and ``parameters()`` see the shards. A parameter whose size is not a
    multiple of the number of processes is padded before the gather, with one call for any number of
    processes.

    A model on which ``fully_shard`` was called (FSDP2) is converted: its parameters stay the same DTensors,
    and its meshes and mixed precision policies apply, but gathers and reductions are in the graph, and
    FSDP2's hooks are removed. Pass it alone.

    Args:
        model: on any device, including ``meta``; the same on every process. The values of rank 0 of the mesh
            are sharded.
        mesh: has one dimension, or two: then the first is replicas, and the second shards. None for a model
            of ``fully_shard``.
        plan: maps patterns of parameter names (``"blocks.*.bias"``) to the sharded dimension, or ``None`` for
            parameters that each process keeps whole (their gradients are still averaged). The first match
            decides. Without one, dimension 0 is sharded.
        param_dtype: dtype of the gathered tensors; by default that of the shards.
        reduce_dtype: dtype in which gradients are reduced; by default ``param_dtype``.

    Returns:
        The model.

    Raises:
        ShardingError: before anything is changed, for arguments of wrong types, a mesh of three dimensions, a
            parameter that cannot be sharded, a pattern that no parameter matches, or settings that only
            FSDP2's hooks support (offloading, hooks of reductions, tensors that gather themselves).
        RankMismatchError: before anything is sent, if another rank shards other parameters, or other
            dimensions of them.
    """
    _check(model, mesh, plan, param_dtype, reduce_dtype)
    if is_fully_sharded(model):
        if mesh is not None or plan or param_dtype is not None or reduce_dtype is not None:
            raise ShardingError(
                "",
                "fully_shard was called on it: its mesh, placements and types are taken; pass the model alone",
            )
        convert_fully_sharded(model)
        return model
    if mesh is None:
        raise ShardingError("", "pass a mesh: fully_shard was not called on the model")
    dimensions = _dimensions(model, mesh, plan or {})
    Answering.introduce()
    agree_on_shards(model, mesh, dimensions)
    shards: dict[nn.Parameter, nn.Parameter] = {}
    gathers: dict[nn.Module, dict[str, Gather]] = {}
    for module in list(model.modules()):
        own = {name: p for name, p in module._parameters.items() if p is not None}
        for name, parameter in own.items():
            gather = Gather(mesh, dimensions[parameter], param_dtype, reduce_dtype)
            if parameter not in shards:
                shards[parameter] = nn.Parameter(
                    distribute_tensor(parameter.detach(), mesh, gather.placements),
                    requires_grad=parameter.requires_grad,
                )
            module._parameters[name] = shards[parameter]
            gathers.setdefault(module, {})[name] = gather
    gather_in_graph(gathers)
    return model


def _check(model: Any, mesh: Any, plan: Any, *dtypes: Any) -> None:
    """Reject arguments of other types than :func:`shard` documents."""
    if not isinstance(model, nn.Module):
        raise ShardingError("", f"expected a module, got {model!r}")
    if not isinstance(mesh, DeviceMesh | None):
        raise ShardingError(
            "", f"expected a mesh (torch.distributed.device_mesh.init_device_mesh), got {mesh!r}"
        )
    if not isinstance(plan, Mapping | None) or not all(isinstance(pattern, str) for pattern in plan or ()):
        raise ShardingError(
            "", f"expected a plan by patterns of parameter names, such as {{'*.bias': None}}, got {plan!r}"
        )
    for what, dtype in zip(("param_dtype", "reduce_dtype"), dtypes, strict=True):
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ShardingError(
                "", f"expected a floating point type, such as torch.bfloat16, as {what}, got {dtype!r}"
            )


def _dimensions(
    model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, int | None]
) -> dict[nn.Parameter, int | None]:
    """Return the dimension along which each parameter is sharded, or ``None``."""
    if mesh.ndim > 2:
        raise ShardingError(
            "", f"the mesh has {mesh.ndim} dimensions: pass one of one, or of two (replicas, shards)"
        )
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            raise ShardingError(
                "",
                f"{type(module).__name__} keeps its weights in a list of its own, which would hold the whole ones: use cells",
            )
    found: dict[nn.Parameter, int | None] = {}
    unmatched = set(plan)
    for name, parameter in model.named_parameters():
        pattern = next((pattern for pattern in plan if fnmatchcase(name, pattern)), None)
        unmatched -= {known for known in plan if fnmatchcase(name, known)}
        if is_lazy(parameter):
            raise ShardingError(
                name, "it has no size before the model is called: call it once, then shard it"
            )
        dimension = (0 if parameter.ndim else None) if pattern is None else plan[pattern]
        if isinstance(parameter, DTensor):
            raise ShardingError(
                name,
                f"it is a DTensor with the placements {parameter.placements} already: shard what is whole",
            )
        if dimension is not None and (type(dimension) is not int or not 0 <= dimension < parameter.ndim):
            raise ShardingError(
                name,
                f"it has {parameter.ndim} dimensions, and the plan says {dimension!r}: give one of them, or None",
            )
        found[parameter] = dimension
    if unmatched:
        raise ShardingError("", f"no parameter matches {', '.join(map(repr, sorted(unmatched)))}")
    return found
