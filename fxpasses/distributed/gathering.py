"""Give modules whole parameters on read: a gather in the forward graph, a reduction in the backward graph."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard


@dataclass(frozen=True)
class Gather:
    """Makes the whole tensor of a shard.

    Attributes:
        mesh: the processes that hold parts. If it has two dimensions, the first is replicas.
        dimension: the sharded dimension; ``None`` for a parameter that each process holds whole.
        param_dtype: the dtype of the whole tensor; by default that of the shard.
        reduce_dtype: the dtype in which the gradient is reduced.
        inner: mesh and placements of the whole tensor, if that is itself a DTensor (tensor parallelism), and
            the size of its local tensor in ``dimension``.
    """

    mesh: DeviceMesh
    dimension: int | None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    inner: tuple[DeviceMesh, tuple[Placement, ...], int] | None = None

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placements of the shard on the mesh."""
        last = Replicate() if self.dimension is None else Shard(self.dimension)
        return (*[Replicate()] * (self.mesh.ndim - 1), last)

    def __call__(self, parameter: Any) -> torch.Tensor:
        """Gather the whole of a parameter."""
        mesh, dimension = self.mesh, self.dimension
        size = even = 0
        if dimension is not None:
            ranks = mesh.size(mesh.ndim - 1)
            size = parameter.shape[dimension] if self.inner is None else self.inner[2]
            even = math.ceil(size / ranks) * ranks
        value = parameter
        if even != size or self.inner is not None:
            local = parameter.to_local()
            if dimension is not None and even != size:
                # DTensor itself would pad, and slice, each process's part separately.
                local = _pad(local, dimension, even // ranks - local.shape[dimension])
            value = DTensor.from_local(local, mesh, self.placements, run_check=False)
        dtypes: dict[str, Any] = {}
        if self.param_dtype is not None or self.reduce_dtype is not None:
            dtypes = {"forward_dtype": self.param_dtype, "backward_dtype": self.reduce_dtype}
        whole = value.redistribute(placements=[Replicate()] * mesh.ndim, **dtypes)
        whole = whole.to_local(grad_placements=[Partial("avg")] * mesh.ndim)
        if dimension is not None and even != size:
            whole = _pad(whole, dimension, size - even)  # one call in the backward, where a slice has two
        if self.inner is None:
            return whole
        return DTensor.from_local(whole, self.inner[0], self.inner[1], run_check=False)


def _pad(value: torch.Tensor, dimension: int, missing: int) -> torch.Tensor:
    """Append zeros along a dimension, or drop elements if ``missing`` is negative."""
    return nn.functional.pad(value, [*[0, 0] * (value.ndim - 1 - dimension), 0, missing])


def gather_in_graph(
    modules: Mapping[nn.Module, Mapping[str, Gather]],
    methods: Mapping[nn.Module, Mapping[str, Any]] | None = None,
) -> None:
    """Make modules gather parameters on read. Each gets a subclass of its class; equal modules share one.

    Args:
        modules: the modules, with the gathers of their parameters by name.
        methods: additional members of a module's class.
    """
    classes: dict[Any, type[nn.Module]] = {}
    for module, gathers in modules.items():
        more = (methods or {}).get(module, {})
        key = type(module), tuple(gathers.items()), bool(more)
        classes[key] = classes.get(key) or _gathering_class(type(module), gathers, more)
        module.__class__ = classes[key]


def _gathering_class(
    kind: type[nn.Module], gathers: Mapping[str, Gather], more: Mapping[str, Any]
) -> type[nn.Module]:
    """Make a subclass whose parameters are gathered when read."""

    def reset_parameters(self: Any) -> None:
        self.__dict__["_reads_shards"] = True  # writes must reach the shards
        try:
            kind.reset_parameters(self)  # type: ignore[attr-defined]
        finally:
            del self.__dict__["_reads_shards"]

    def read(name: str, gather: Gather) -> property:
        def whole(self: Any) -> torch.Tensor:
            parameter = self._parameters[name]
            if parameter is None or "_reads_shards" in self.__dict__:
                return parameter
            return gather(parameter)

        return property(whole)

    members: dict[str, Any] = {name: read(name, gather) for name, gather in gathers.items()}
    if hasattr(kind, "reset_parameters"):
        members["reset_parameters"] = reset_parameters
    names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**members, **more, **names})
