"""Mutation in Dynamo graphs: the memory that a call writes to.

Dynamo graphs call torch's Python functions, which have no schema. So this relies on names and arguments.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from fxpasses.regional import _torch
from fxpasses.regional.sizes import value_of

_WRITING = frozenset(
    {
        "setitem",
        "iadd",
        "isub",
        "imul",
        "itruediv",
        "ifloordiv",
        "imod",
        "ipow",
        "imatmul",
        "iand",
        "ior",
        "ixor",
    }
)


def target_name(node: fx.Node) -> str:
    """Return the plain name of what a node calls: ``relu`` for the function, the method and the operator."""
    target = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, _torch.OpOverload):
        return target._schema.name.partition("::")[2]
    return str(getattr(target, "__name__", ""))


def written_by(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a call may write to, by torch's naming conventions and arguments."""
    name = target_name(node)
    found = updated_statistics(node)
    in_place = node.op == "call_method" and name.endswith("_") and not name.endswith("__")
    in_place |= (name.endswith("_") and not name.startswith("_")) or name in _WRITING
    flagged = node.kwargs.get("inplace") is True or any(a is True for a in node.args[1:])
    if (in_place or flagged) and node.args and isinstance(node.args[0], fx.Node):
        found.append(node.args[0])
    out = node.kwargs.get("out")
    found += [n for n in (out if isinstance(out, (list, tuple)) else [out]) if isinstance(n, fx.Node)]
    if isinstance(node.target, _torch.HigherOrderOperator) or (
        isinstance(node.target, _torch.OpOverload) and node.target._schema.is_mutable
    ):
        found += node.all_input_nodes
    return found


def updated_statistics(node: fx.Node) -> list[fx.Node]:
    """Return the running statistics that a normalization updates, which its schema does not declare."""
    name = target_name(node)
    if "batch_norm" not in name and "instance_norm" not in name:
        return []
    arguments = dict(
        zip(("input", "running_mean", "running_var", "weight", "bias", "training"), node.args, strict=False)
    )
    arguments.update(node.kwargs)
    if not arguments.get("training", arguments.get("use_input_stats", True)):
        return []
    statistics = (arguments.get("running_mean"), arguments.get("running_var"))
    return [n for n in statistics if isinstance(n, fx.Node)]


def changed_memory(nodes: Iterable[fx.Node]) -> set[int]:
    """Return the storages that these calls may write to. Args: nodes of a Dynamo graph."""
    return {
        _torch.storage_of(value)
        for node in nodes
        if node.op in ("call_function", "call_method")
        for value in map(value_of, written_by(node))
        if isinstance(value, torch.Tensor)
    }
