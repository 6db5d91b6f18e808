"""The cost of saving a value (bytes) and of recomputing it (FLOPs).

Both are estimates from metadata: no kernel runs, and no guard is installed on a symbolic size (its hint is used).
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.fx as fx

from fake.seam import pytree
from fxpasses.partitioner import _torch


class CostModel:
    """Bytes and FLOPs of the nodes of one joint graph, each computed at most once."""

    def __init__(self) -> None:
        self._bytes: dict[fx.Node, int] = {}
        self._flops: dict[fx.Node, int] = {}
        self._flops_of_shapes: dict[object, int] = {}

    def bytes_of(self, node: fx.Node) -> int:
        """Bytes of the tensors in the node's value: elements times item size, 0 for anything else."""
        size = self._bytes.get(node)
        if size is None:
            size = sum(_numel(t) * t.dtype.itemsize for t in _tensors(node.meta.get("val")))
            self._bytes[node] = size
        return size

    def flops_of(self, node: fx.Node) -> int:
        """FLOPs of one run of the node.

        Matmuls, convolutions and attention use the formulas of `torch.utils.flop_counter`. Everything else
        counts one operation per element read or written, whichever is more. Views, symbols and tuple
        extraction are free.
        """
        flops = self._flops.get(node)
        if flops is None:
            flops = self._flops[node] = self._count(node)
        return flops

    @staticmethod
    def has_formula(node: fx.Node) -> bool:
        """Whether a formula counts the node's FLOPs: it is a matmul, a convolution or attention."""
        return isinstance(node.target, _torch.OpOverload) and _formula(node) is not None

    def flops_and_bytes(self, node: fx.Node) -> tuple[int, int] | None:
        """FLOPs of a call, and the bytes that it reads and writes; ``None`` for a free call."""
        computes = node.op == "call_function" and not is_view(node) and not is_getitem(node)
        if not computes or not isinstance(node.meta.get("val"), torch.Tensor | list | tuple):
            return None
        return self.flops_of(node), sum(map(self.bytes_of, (node, *node.all_input_nodes)))

    def _count(self, node: fx.Node) -> int:
        if node.op != "call_function" or _torch.is_sym_node(node) or is_view(node) or is_getitem(node):
            return 0
        formula = _formula(node)
        if formula is not None:
            return self._by_formula(node, formula)
        read = max((_numel(t) for n in node.all_input_nodes for t in _tensors(n.meta.get("val"))), default=0)
        written = sum(_numel(t) for t in _tensors(node.meta.get("val")))
        return max(read, written)

    def _by_formula(self, node: fx.Node, formula: Any) -> int:
        values = pytree.tree_map(_to_meta, (node.args, node.kwargs, node.meta.get("val")))
        key = (node.target, repr(values))
        if key not in self._flops_of_shapes:
            args, kwargs, output = values
            self._flops_of_shapes[key] = int(formula(*args, **kwargs, out_val=output))
        return self._flops_of_shapes[key]


def _formula(node: fx.Node) -> Any:
    return _torch.flop_registry.get(getattr(node.target, "overloadpacket", node.target))


def is_view(node: fx.Node) -> bool:
    """Whether the operator returns a view of an argument by its schema, so that it computes nothing."""
    target = node.target
    if not isinstance(target, _torch.OpOverload):
        return False
    known = _VIEW_OPERATORS.get(target)
    if known is None:
        schema = target._schema
        known = _VIEW_OPERATORS[target] = not schema.is_mutable and any(
            argument.alias_info is not None for argument in schema.arguments
        )
    return known


def is_getitem(node: fx.Node) -> bool:
    """Whether the node extracts one value from a tuple or list."""
    return getattr(node.target, "__name__", None) == "getitem" and node.op == "call_function"


_VIEW_OPERATORS: dict[object, bool] = {}  # a cache of a pure function of the operator


def _tensors(value: object) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, list | tuple):
        return [t for item in value for t in _tensors(item)]
    if isinstance(value, dict):
        return [t for item in value.values() for t in _tensors(item)]
    return ()


def _numel(tensor: torch.Tensor) -> int:
    numel = 1
    for size in tensor.shape:
        numel *= _torch.hint_of(size)
    return numel


def _to_meta(value: object) -> object:
    """Replace an argument of a FLOP formula: a tensor becomes one without data and with integer sizes."""
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    if isinstance(value, torch.Tensor):
        shape = [_torch.hint_of(size) for size in value.shape]
        return torch.empty(shape, dtype=value.dtype, device="meta")
    if isinstance(value, torch.SymInt):
        return _torch.hint_of(value)
    return value
