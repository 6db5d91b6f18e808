"""Parameters as shards that are gathered where they are used: in the graph, where passes see it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fxpasses.errors import ShardingError

__all__ = ["shard"]


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, int | None] | None = None,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Shard the parameters of a model over the processes of a mesh, in place.

    A parameter becomes a DTensor of which each process holds one part. Where a module reads it (``self.weight``), it gets the whole tensor, gathered;
    in the backward pass the gradient is averaged over the processes and scattered. Both are calls in the graph that is compiled, not hooks. Optimizers, ``state_dict``,
    ``torch.distributed.checkpoint`` and ``parameters()`` see the shards. A parameter whose size is no multiple of the number of processes is padded before it is
    gathered: one call, whatever the number of processes.

    Args:
        model: on any device, ``meta`` included; every process has the same one. What rank 0 of the mesh holds is what is sharded.
        mesh: of one dimension, or of two: then the first is of replicas, and the second shards.
        plan: for patterns of parameter names (``"blocks.*.bias"``) the dimension that is sharded, ``None`` for parameters of which each
            process keeps the whole (their gradients are averaged all the same); the first that matches decides. Dimension 0 without one.
        param_dtype: of the gathered tensors; that of the shards by default.
        reduce_dtype: in which gradients are reduced; ``param_dtype`` by default.

    Returns:
        The model.

    Raises:
        ShardingError: before anything is changed, for a mesh of three dimensions, a parameter that cannot be sharded, or a pattern that no parameter matches.
    """
    plan = plan or {}
    dimensions = _dimensions(model, mesh, plan)
    shards: dict[nn.Parameter, nn.Parameter] = {}
    classes: dict[Any, type[nn.Module]] = {}
    gather = _Gather(mesh, param_dtype, reduce_dtype)
    for module in list(model.modules()):
        own = {name: p for name, p in module._parameters.items() if p is not None}
        for name, parameter in own.items():
            if parameter not in shards:
                dimension = dimensions[parameter]
                last = Replicate() if dimension is None else Shard(dimension)
                placements = [*[Replicate()] * (mesh.ndim - 1), last]
                shards[parameter] = nn.Parameter(
                    distribute_tensor(parameter.detach(), mesh, placements),
                    requires_grad=parameter.requires_grad,
                )
            module._parameters[name] = shards[parameter]
        if own:
            key = type(module), tuple(own)
            classes[key] = classes.get(key) or _gathering(type(module), tuple(own), gather)
            module.__class__ = classes[key]
    return model


def _dimensions(
    model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, int | None]
) -> dict[nn.Parameter, int | None]:
    """The dimension along which each parameter is sharded, or ``None``."""
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


def _gathering(kind: type[nn.Module], names: tuple[str, ...], gather: _Gather) -> type[nn.Module]:
    """A subclass whose parameters are gathered where they are read."""

    def reset_parameters(self: Any) -> None:
        self.__dict__["_reads_shards"] = True  # what is written has to reach the shards
        try:
            kind.reset_parameters(self)  # type: ignore[attr-defined]
        finally:
            del self.__dict__["_reads_shards"]

    def read(name: str) -> property:
        def whole(self: Any) -> torch.Tensor:
            parameter = self._parameters[name]
            if parameter is None or "_reads_shards" in self.__dict__:
                return parameter
            return gather(parameter)

        return property(whole)

    members: dict[str, Any] = {name: read(name) for name in names}
    if hasattr(kind, "reset_parameters"):
        members["reset_parameters"] = reset_parameters
    return type(kind.__name__, (kind,), {**members, "__module__": kind.__module__, "__doc__": kind.__doc__})


class _Gather:
    """Makes whole tensors of shards."""

    def __init__(
        self, mesh: DeviceMesh, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
    ) -> None:
        self._mesh = mesh
        self._dtypes: dict[str, Any] = {}
        if param_dtype is not None or reduce_dtype is not None:
            self._dtypes = {"forward_dtype": param_dtype, "backward_dtype": reduce_dtype}

    def __call__(self, parameter: Any) -> torch.Tensor:
        mesh, placements = self._mesh, parameter.placements
        ranks = mesh.size(mesh.ndim - 1)
        dimension = getattr(placements[-1], "dim", None)
        size = 0 if dimension is None else parameter.shape[dimension]
        even = math.ceil(size / ranks) * ranks
        value = parameter
        if even != size:
            # DTensor itself would pad, and cut, the part of each process on its own.
            local = parameter.to_local()
            missing = even // ranks - local.shape[dimension]
            before = [0, 0] * (parameter.ndim - 1 - dimension)
            local = nn.functional.pad(local, [*before, 0, missing])
            value = DTensor.from_local(local, mesh, placements, run_check=False)
        whole = value.redistribute(placements=[Replicate()] * mesh.ndim, **self._dtypes)
        whole = whole.to_local(grad_placements=[Partial("avg")] * mesh.ndim)
        return whole if even == size else whole.narrow(dimension, 0, size)
