"""Which operators speak with other processes."""

from __future__ import annotations

import functools
from typing import Any

from fake.seam.dispatch import OpOverload, OpOverloadPacket

NAMESPACES = {
    "_c10d_functional",
    "_c10d_functional_autograd",
    "c10d_functional",
    "c10d",
    "_dtensor",
    "symm_mem",
}
_GROUPS = {"group_name", "process_group", "ranks"}
"""Names of arguments that say with whom an operator speaks, in torch and in libraries that follow it."""


@functools.cache
def communicates(target: Any) -> bool:
    """Whether an operator speaks with other processes: by its namespace, or because it is given a group of them.

    In the graphs that Dynamo makes, functions of ``torch.distributed`` do, too.

    >>> import torch
    >>> communicates(torch.ops._c10d_functional.all_reduce.default), communicates(torch.ops.aten.sin.default)
    (True, False)
    """
    if isinstance(target, OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    if not isinstance(target, OpOverload):
        return str(getattr(target, "__module__", "")).startswith("torch.distributed")
    arguments = target._schema.arguments
    return (
        target.namespace in NAMESPACES
        or any(a.name in _GROUPS for a in arguments)
        or any("classes.c10d" in str(a.type) for a in arguments)
    )
