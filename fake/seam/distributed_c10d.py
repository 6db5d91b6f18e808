"""``torch.distributed.distributed_c10d``: process groups by the names that graphs hold."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def process_group(name: str) -> Any:
    """The process group of a name.

    Raises:
        Exception: there is none.
    """
    return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def group_ranks(group: Any) -> list[int] | None:
    """The global ranks of a process group that graphs hold, in order; ``None`` where this process knows none of that name.

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
    """The global ranks of a process group of this process (``None``: all of the job), in order; one that cannot talk (``"fake"``) has only this rank."""
    found = None if group is None else process_group(group)
    ranks = list(dist.get_process_group_ranks(found))
    return ranks if dist.get_backend(found) != "fake" else [dist.get_rank()]
