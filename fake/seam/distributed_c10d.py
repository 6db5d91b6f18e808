"""``torch.distributed.distributed_c10d``: process groups by the names used in graphs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def process_group(name: str) -> Any:
    """Return the process group with a name.

    Raises:
        Exception: there is no such group.
    """
    return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def group_ranks(group: Any) -> list[int] | None:
    """Return the global ranks of a process group used in a graph, in order;
    ``None`` if this process does not know it.

    Args:
        group: its name, or the group itself.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    try:
        return list(dist.get_process_group_ranks(process_group(group) if isinstance(group, str) else group))
    except (KeyError, ValueError, RuntimeError, TypeError):
        return None


def ranks_of(group: str | None) -> list[int]:
    """Return the global ranks of a process group of this process (``None``: the whole job), in order. A group
    that cannot communicate (``"fake"``) has only this rank."""
    found = None if group is None else process_group(group)
    ranks = list(dist.get_process_group_ranks(found))
    return ranks if dist.get_backend(found) != "fake" else [dist.get_rank()]
