"""Where a module reads a parameter that is a shard, it gets the whole: a gather in the forward pass, a reduction in the backward pass, both in the graph."""

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
        mesh: the processes that hold parts; of two dimensions, the first is of replicas.
        dimension: that is sharded; ``None`` for a parameter of which each process has the whole.
        param_dtype: of the whole; that of the shard by default.
        reduce_dtype: in which the gradient is reduced.
        inner: mesh and placements of the whole where that is a DTensor again (tensor parallelism), and the size of its local tensor in ``dimension``.
    """

    mesh: DeviceMesh
    dimension: int | None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    inner: tuple[DeviceMesh, tuple[Placement, ...], int] | None = None

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Of the shard on the mesh."""
        last = Replicate() if self.dimension is None else Shard(self.dimension)
        return (*[Replicate()] * (self.mesh.ndim - 1), last)

    def __call__(self, parameter: Any) -> torch.Tensor:
        """The whole of a parameter."""
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
                # DTensor itself would pad, and cut, the part of each process on its own.
                local = _pad(local, dimension, even // ranks - local.shape[dimension])
            value = DTensor.from_local(local, mesh, self.placements, run_check=False)
        dtypes: dict[str, Any] = {}
        if self.param_dtype is not None or self.reduce_dtype is not None:
            dtypes = {"forward_dtype": self.param_dtype, "backward_dtype": self.reduce_dtype}
        whole = value.redistribute(placements=[Replicate()] * mesh.ndim, **dtypes)
        whole = whole.to_local(grad_placements=[Partial("avg")] * mesh.ndim)
        if dimension is not None and even != size:
            whole = _pad(whole, dimension, size - even)  # its gradient is one call, that of a slice two
        if self.inner is None:
            return whole
        return DTensor.from_local(whole, self.inner[0], self.inner[1], run_check=False)


def _pad(value: torch.Tensor, dimension: int, missing: int) -> torch.Tensor:
    """Zeros behind a dimension, or so many elements less."""
    return nn.functional.pad(value, [*[0, 0] * (value.ndim - 1 - dimension), 0, missing])


def gather_in_graph(
    modules: Mapping[nn.Module, Mapping[str, Gather]],
    methods: Mapping[nn.Module, Mapping[str, Any]] | None = None,
) -> None:
    """Let modules gather parameters where they read them: each gets a subclass of its class, equal ones the same.

    Args:
        modules: and the gathers of their parameters, by name.
        methods: what else a module's class has.
    """
    classes: dict[Any, type[nn.Module]] = {}
    for module, gathers in modules.items():
        more = (methods or {}).get(module, {})
        key = type(module), tuple(gathers.items()), bool(more)
        classes[key] = classes.get(key) or _gathering(type(module), gathers, more)
        module.__class__ = classes[key]


def _gathering(
    kind: type[nn.Module], gathers: Mapping[str, Gather], more: Mapping[str, Any]
) -> type[nn.Module]:
    """A subclass whose parameters are gathered where they are read."""

    def reset_parameters(self: Any) -> None:
        self.__dict__["_reads_shards"] = True  # what is written has to reach the shards
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
