"""Remove views, copies and casts that change nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxpasses.graphs.aliasing import AliasInfo
from fxpasses.graphs.rewriting import replace, same_metadata, value_of
from fxpasses.pass_manager.pass_base import Contract, Pass
from fxpasses.pass_manager.sites import claim

aten, prims = torch.ops.aten, torch.ops.prims

_VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.expand.default,
    aten.permute.default,
    aten.slice.Tensor,
    aten.alias.default,
    aten.as_strided.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.detach.default,
}
_COPIES = {
    aten.clone.default,
    aten._to_copy.default,
    aten.contiguous.default,
    prims.convert_element_type.default,
    prims.device_put.default,
}
_CASTS = {aten._to_copy.default, prims.convert_element_type.default}
_RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}


@dataclass(frozen=True)
class RemoveNoOps(Pass):
    """Remove calls whose result equals their input in value, shape, stride, dtype and device.

    Applies to views and reshapes to the same shape, chains of reshapes or permutations, copies, casts to the
    same dtype, and casts to a wider dtype and back. A copy stays if it separates memory: if it is returned,
    or the graph writes to its source. A returned view stays if other outputs, or inputs, share its memory.

    Before::

        a = aten.view(x, [2, 3])          # x: f32[2, 3]
        b = aten._to_copy(a, dtype=f32)
        c = aten.view(b, [6])
        d = aten.view(c, [3, 2])
        return aten.sin(d)

    After::

        d = aten.view(x, [3, 2])
        return aten.sin(d)
    """

    name: ClassVar[str] = "remove_no_ops"
    contract: ClassVar[Contract] = Contract(
        ("joint", "inference"), invalidates="no_dead_code", numerics="bitwise", metadata="exact"
    )

    def apply(self, gm: fx.GraphModule) -> bool:
        aliases = AliasInfo(gm.graph)
        returned = {n for output in gm.graph.find_nodes(op="output") for n in output.all_input_nodes}
        # Memory that the graph allocates and that holds one output. The base of a returned view may be
        # returned instead of the view.
        lying = Counter(root for n in returned for root in aliases.roots(n))
        private = {root for root, results in lying.items() if results == 1 and root.op == "call_function"}
        changed = False
        for node in list(gm.graph.nodes):
            if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
                continue
            source = node.args[0]
            if _shorten_chain(node, source):
                source = node.args[0]
                changed = True
            equal = _equal_input(node, source)
            if equal is None or (
                node in returned and not (node.target in _VIEWS and private >= aliases.roots(node))
            ):
                continue
            if node.target in _COPIES and not _copy_is_private(node, equal, aliases):
                continue
            if claim(node):
                replace(node, equal)
                changed = True
        return changed


def _shorten_chain(node: fx.Node, source: fx.Node) -> bool:
    """Make a reshape of a reshape, or a permutation of a permutation, start from the first one's input."""
    base = source.args[0] if source.args else None
    if not isinstance(base, fx.Node):
        return False
    if node.target in _RESHAPES and source.target in _RESHAPES and _reshapes_directly(base, node):
        if not claim(node):
            return False
        node.args = (base, *node.args[1:])
        return True
    if node.target is aten.permute.default and source.target is aten.permute.default and claim(node):
        rank = value_of(node).dim()
        inner, outer = ([d % rank for d in n.args[1]] for n in (source, node))  # type: ignore[union-attr]
        node.args = (base, [inner[d] for d in outer])
        return True
    return False


def _equal_input(node: fx.Node, source: fx.Node) -> fx.Node | None:
    """Return the earlier node that has ``node``'s value, or None."""
    same = same_metadata(value_of(node), value_of(source))
    if same and node.target in _VIEWS | _COPIES and not _offset_differs(node, source):
        return source
    if node.target in _CASTS and source.target in _CASTS and isinstance(source.args[0], fx.Node):
        original = source.args[0]
        if same_metadata(value_of(node), value_of(original)) and _widens(original, source):
            return original
    return None


def _offset_differs(node: fx.Node, source: fx.Node) -> bool:
    if node.target not in (aten.as_strided.default, aten.slice.Tensor):
        return False
    a, b = value_of(node).storage_offset(), value_of(source).storage_offset()
    return not (isinstance(a, int) and isinstance(b, int) and a == b)


def _widens(narrow: fx.Node, wide: fx.Node) -> bool:
    """Whether casting to ``wide``'s dtype and back preserves every value of ``narrow``'s dtype."""
    a, b = value_of(narrow).dtype, value_of(wide).dtype
    if value_of(narrow).device != value_of(wide).device:
        return False
    return a is not b and _represents_all(b, a)


def _represents_all(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether ``wide`` represents every value of ``narrow``.

    Torch's promotion does not tell: int64 promotes to float16, float8 to nothing.
    """
    real = wide.is_complex or (wide.is_floating_point and wide.itemsize > 1)
    if not (real or wide in _INTEGERS):
        return False
    if narrow is torch.bool:
        return True
    if narrow in _INTEGERS:
        small = torch.iinfo(narrow)
        if real:
            return small.max <= min(2 / torch.finfo(wide).eps, torch.finfo(wide).max)
        return torch.iinfo(wide).min <= small.min and small.max <= torch.iinfo(wide).max
    is_real = narrow.is_complex or (narrow.is_floating_point and narrow is not torch.float4_e2m1fn_x2)
    if not (real and is_real) or (narrow.is_complex and not wide.is_complex):
        return False
    a, b = torch.finfo(narrow), torch.finfo(wide)
    return b.eps <= a.eps and b.max >= a.max and b.smallest_normal * b.eps <= a.smallest_normal * a.eps


_INTEGERS = {
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64
}  # fmt: skip


def _reshapes_directly(base: fx.Node, node: fx.Node) -> bool:
    """Whether one reshape of ``base`` can compute ``node``'s value. It can if ``base`` is contiguous."""
    value = value_of(base)
    if not isinstance(value, torch.Tensor) or not _statically_contiguous(value):
        return False
    # A view of a copy must not become a view of the original: `_unsafe_view` and `reshape` may copy.
    return node.target is aten.view.default


def _statically_contiguous(value: torch.Tensor) -> bool:
    if all(isinstance(s, int) for s in (*value.shape, *value.stride())):
        return value.is_contiguous()
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if getattr(getattr(stride, "node", None), "expr", stride) != getattr(
            getattr(expected, "node", None), "expr", expected
        ):
            return False
        expected = expected * size
    return True


def _copy_is_private(copy: fx.Node, source: fx.Node, aliases: AliasInfo) -> bool:
    """Whether nobody can tell the copy from its source: it is not returned, and neither is written to."""
    both = aliases.roots(copy) | aliases.roots(source)
    return not (aliases.roots(copy) & aliases.output) and not (both & aliases.mutated)
