"""Recognize operators that communicate with other processes."""

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
"""Argument names that identify a process group, in torch and in libraries that follow its conventions."""


@functools.cache
def communicates(target: Any) -> bool:
    """Return whether an operator communicates with other processes:
    by its namespace or a process group argument.

    In graphs captured by Dynamo, functions of ``torch.distributed`` communicate, too.

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
