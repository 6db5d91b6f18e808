"""DTensors and device meshes, recognized without importing them: in a process that has none, nothing is loaded."""

from __future__ import annotations

import sys
from typing import Any


def tensors_of_torch() -> Any:
    """``torch.distributed.tensor``, if anything has imported it: without it there is no DTensor."""
    return sys.modules.get("torch.distributed.tensor")


def is_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor."""
    tensors = tensors_of_torch()
    return tensors is not None and isinstance(value, tensors.DTensor)


def local_of(value: Any) -> Any:
    """The local tensor of a DTensor; any other value itself."""
    return value._local_tensor if is_dtensor(value) else value


def mesh_of(value: Any) -> Any:
    """The device mesh that a value is or stands for, or ``None``."""
    value = getattr(value, "real_obj", value)
    meshes = sys.modules.get("torch.distributed.device_mesh")
    return value if meshes is not None and isinstance(value, meshes.DeviceMesh) else None
