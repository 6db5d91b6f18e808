"""Value numbering: nodes of a joint graph that compute the same value, found without touching the graph.

Autograd's formulas repeat work of the forward pass (a mask, a cast, a broadcast). Taking such calls for one value keeps
the partitioner from saving, or recomputing, the same thing twice.
"""

from typing import Any

import torch
import torch.fx as fx

from fxpasses.partitioner import _torch


def number_values(nodes: list[fx.Node], index: dict[fx.Node, int], outputs: list[Any]) -> list[int]:
    """Find the first node that computes the same value as each node.

    Never taken for the same: calls of the RNG, of operators with an effect and of those that write to memory; calls on both
    sides of a write are kept apart as well. Values that share storage with an output are kept apart too, as the caller may
    tell them apart.

    Args:
        nodes: all nodes but the output, in the order of the graph.
        index: the position of each in ``nodes``.
        outputs: the values that the graph returns, constants included.

    Returns:
        For each node the position of the first one with its value: its own, if none came before.
    """
    first = list(range(len(nodes)))
    seen: dict[object, int] = {}
    returned = {s for node in outputs if isinstance(node, fx.Node) and (s := _storage(node)) is not None}
    writes = 0
    for i, node in enumerate(nodes):
        if node.op != "call_function":
            continue
        target: Any = node.target
        if not isinstance(target, _torch.OpOverload):
            if not _torch.is_sym_node(node) and not _is_getitem(node):
                continue
        elif target._schema.is_mutable:
            writes += 1
            continue
        elif (
            torch.Tag.nondeterministic_seeded in target.tags
            or node.is_impure()
            or target.overloadpacket in _UNINITIALIZED
            or "unbacked_bindings" in node.meta
        ):
            continue
        if returned and _storage(node) in returned:
            continue
        key = (target, writes, _key(node.args, index, first), _key(node.kwargs, index, first))
        try:
            first[i] = seen.setdefault(key, i)
        except TypeError:  # an argument without a hash, such as a symbolic number: not worth more
            continue
    return first


_UNINITIALIZED = frozenset(
    [torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided, torch.ops.aten.new_empty]
)


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", None) == "getitem"


def _key(value: Any, index: dict[fx.Node, int], first: list[int]) -> object:
    """`value` with nodes by the number of their value; types are kept, for 1, 1.0 and True are equal."""
    if isinstance(value, fx.Node):
        return ("node", first[index[value]])
    if isinstance(value, list | tuple):
        return ("list", *[_key(item, index, first) for item in value])
    if isinstance(value, dict):
        return ("dict", *[(name, _key(item, index, first)) for name, item in value.items()])
    if isinstance(value, slice):
        return ("slice", _key((value.start, value.stop, value.step), index, first))
    if isinstance(value, float):
        return ("float", repr(value))  # -0.0 equals 0.0, and nan does not equal itself
    return (type(value), value)


def _storage(node: fx.Node) -> int | None:
    """An identity of the storage behind the node's value, None where it has none."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    try:
        return value.untyped_storage()._cdata
    except NotImplementedError:  # a tensor subclass without storage
        return None
