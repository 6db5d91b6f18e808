"""Recognize DTensors and device meshes without importing them: a process that has none loads nothing."""

from __future__ import annotations

import sys
from typing import Any


def tensors_of_torch() -> Any:
    """Return ``torch.distributed.tensor`` if it has been imported: otherwise there are no DTensors."""
    return sys.modules.get("torch.distributed.tensor")


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor."""
    tensors = tensors_of_torch()
    return tensors is not None and isinstance(value, tensors.DTensor)


def placement_classes() -> dict[str, Any]:
    """Return the placements of DTensors by name. ``torch.distributed.tensor`` has been imported."""
    tensors = tensors_of_torch()
    strided = tensors.placement_types._StridedShard  # FSDP over tensor parallelism
    return {
        "Shard": tensors.Shard, "StridedShard": strided, "Replicate": tensors.Replicate, "Partial": tensors.Partial
    }  # fmt: skip


def is_plain_placement(value: Any) -> bool:
    """Return whether a value is a placement that its repr describes completely (a masked one holds a tensor)."""
    return tensors_of_torch() is not None and type(value) in placement_classes().values()


def local_of(value: Any) -> Any:
    """Return the local tensor of a DTensor; any other value unchanged."""
    return value._local_tensor if is_dtensor(value) else value


def mesh_of(value: Any) -> Any:
    """Return the device mesh that a value is or stands for, or ``None``."""
    value = getattr(value, "real_obj", value)
    meshes = sys.modules.get("torch.distributed.device_mesh")
    return value if meshes is not None and isinstance(value, meshes.DeviceMesh) else None
