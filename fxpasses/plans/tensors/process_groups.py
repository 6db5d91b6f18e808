"""What a plan depends on of process groups, device meshes and placements: their ranks and names in graphs."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from fake.seam.dtensor import is_plain_placement


def describe_group(value: Any) -> tuple[Any, ...] | None:
    """Everything about a process group, device mesh or placement that decides what is traced, the same in
    each launch of a job. ``None`` for other objects."""
    if not dist.is_available():
        return None
    if isinstance(value, dist.ProcessGroup):
        return "process group", *_group_facts(value)
    if is_plain_placement(value):
        return "placement", repr(value)
    meshes = sys.modules.get("torch.distributed.device_mesh")
    if meshes is None or not isinstance(value, meshes.DeviceMesh):
        return None
    groups = (
        [_group_facts(group) for group in value.get_all_groups()]
        if value.get_coordinate() is not None
        else []
    )
    return "device mesh", value.device_type, value.mesh.tolist(), value.mesh_dim_names, groups


def _group_facts(group: dist.ProcessGroup) -> tuple[str, list[int], str]:
    return str(group.group_name), list(dist.get_process_group_ranks(group)), dist.get_backend(group)
