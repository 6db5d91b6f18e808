"""Compute gradients that are zero except in a few rows for only those rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from fxpasses.graphs.rewriting import replace, same_metadata, value_of
from fxpasses.pass_manager.pass_base import Contract, Pass
from fxpasses.pass_manager.sites import claim
from fxpasses.passes._matching import (
    RESHAPES,
    calls_before,
    erase_unused,
    is_call,
    is_zeros,
    restride,
    shape_of,
    untransposed,
)
from fxpasses.passes._rowwise import Selection, kept_dimension, reshape, select_inputs

aten, prims = torch.ops.aten, torch.ops.prims

Call = Callable[..., fx.Node]

_LINEAR = {aten.neg.default, aten.clone.default, prims.convert_element_type.default}
"""Operators that map zeros to zeros."""


@dataclass(frozen=True)
class SkipZeroRows(Pass):
    """Follow a gradient that is nonzero only in a slice, and compute only that slice.

    A classifier on the first token, or a loss on the last one, gives a gradient that is zero for all other
    positions. As written, the zeros pass through the linear layers below and their weight gradients.

    Before::

        full = aten.select_scatter(aten.full([8, 197, 768], 0.0), grad, 1, 0)        # f32[8, 197, 768]
        rows = aten.view(full, [1576, 768])
        grad_weight = aten.mm(aten.permute(rows, [1, 0]), x)                         # x: f32[1576, 768]
        grad_x = aten.view(aten.mm(rows, weight), [8, 197, 768])

    After::

        grad_weight = aten.mm(aten.permute(grad, [1, 0]), x_first)                   # x_first: f32[8, 768]
        part = aten.view(aten.mm(grad, weight), [8, 1, 768])
        grad_x = aten.slice_scatter(aten.full([8, 197, 768], 0.0), part, 1, 0, 1)

    The forward pass then only needs those rows, so ``hoist_slices``, run after this pass, can skip the
    others. Equal up to rounding if activations are finite: zero times infinity is NaN, a skipped row is not.
    """

    name: ClassVar[str] = "skip_zero_rows"
    contract: ClassVar[Contract] = Contract("joint", numerics="tolerance")

    def apply(self, gm: fx.GraphModule) -> bool:
        changed = False
        for node in list(gm.graph.nodes):
            if not is_call(node, aten.select_scatter.default, aten.slice_scatter.default):
                continue
            if not _reaches_matmul(node) or shape_of(node) is None or not claim(node):
                continue
            existing = set(gm.graph.nodes)
            rows = _Rows.of_scatter(node)
            if rows is not None and rows.follow(node):
                changed = True
                continue
            for new in reversed(gm.graph.nodes):
                if new not in existing:
                    gm.graph.erase_node(new)
        return changed


def _reaches_matmul(node: fx.Node) -> bool:
    """Whether there is a linear layer below. Otherwise there is nothing to gain."""
    seen, pending = {node}, [node]
    while pending:
        for user in pending.pop().users:
            if is_call(user, aten.mm.default):
                return True
            if user not in seen and (user.target in _LINEAR or is_call(user, *RESHAPES, *_FOLLOWED)):
                seen.add(user)
                pending.append(user)
    return False


@dataclass(frozen=True)
class _Part(Selection):
    """A slice, and the values that are zero outside of it, with their contents inside."""

    known: dict[fx.Node, fx.Node] = field(default_factory=dict, compare=False)

    def of(self, node: fx.Node, call: Call) -> fx.Node:
        return self.known[node] if node in self.known else super().of(node, call)


@dataclass
class _Rows:
    """Values known to be zero outside a slice, while one gradient is followed.

    Attributes:
        parts: for each value that is zero outside a slice: the slice, and the value in it.
        flat: matrices whose rows are those of such a value: the slice, the value in it, and the shape of all
            rows.
    """

    parts: dict[fx.Node, tuple[Selection, fx.Node]] = field(default_factory=dict)
    flat: dict[fx.Node, tuple[Selection, fx.Node, list[int]]] = field(default_factory=dict)

    @classmethod
    def of_scatter(cls, node: fx.Node) -> _Rows | None:
        arguments: list[Any] = list(node.args)
        shape = shape_of(node)
        if shape is None or not is_zeros(arguments[0]) or node.kwargs:
            return None
        dim = int(arguments[2] if len(arguments) > 2 else 0) % len(shape)
        call = calls_before(node, like=node)
        if node.target is aten.select_scatter.default:
            start = int(arguments[3]) % shape[dim]
            return cls(
                {node: (Selection(dim, start, start + 1), call(aten.unsqueeze.default, arguments[1], dim))}
            )
        start, end, step = (arguments[3:] + [None] * 3)[:3]
        size = shape[dim]
        bounds = (0 if start is None else start, size if end is None else end)
        if step not in (None, 1) or not all(isinstance(n, int) for n in bounds):
            return None
        start, end = (max(0, n + size) if n < 0 else min(n, size) for n in bounds)
        if not start < end or end - start == size:
            return None
        return cls({node: (Selection(dim, start, end), arguments[1])})

    def follow(self, start: fx.Node) -> bool:
        changed = False
        node = start.next
        while node.op != "output":
            after = node.next
            if node not in self.parts and any(
                n in self.parts or n in self.flat for n in node.all_input_nodes
            ):
                changed |= self._step(node)
            node = after
        if not changed:
            return False
        for value, (chosen, part) in list(self.parts.items()):
            outside = [u for u in value.users if u not in self.parts and u not in self.flat]
            if value is not start and outside:
                whole = _scatter(part, chosen, value)
                for user in outside:
                    user.replace_input_with(value, whole)
        for value, (chosen, part, outer) in list(self.flat.items()):
            outside = [
                u for u in value.users if u not in self.parts and u not in self.flat and not _is_dead(u)
            ]
            if outside and is_call(value, aten.mm.default):
                whole = _scatter(part, chosen, value, [*outer, value_of(value).shape[1]])
                matrix = calls_before(value)(aten.view.default, whole, list(value_of(value).shape))
                for user in outside:
                    user.replace_input_with(value, matrix)
        for value in sorted({*self.parts, *self.flat}, reverse=True):
            erase_unused(value)
        for _, part in self.parts.values():
            erase_unused(part)
        return True

    def _step(self, node: fx.Node) -> bool:
        """Follow the slice through one user. Returns whether something smaller replaced it."""
        sources = [n for n in node.all_input_nodes if n in self.parts]
        if not sources:
            return self._step_flat(node)
        source = sources[0]
        chosen, part = self.parts[source]
        if any(shape_of(n) is None for n in (node, *node.all_input_nodes)):
            return False
        call = calls_before(node, like=node)
        if is_call(node, aten.sum.dim_IntList) and chosen.dim in _dims(node, source):
            total = call(node.target, part, *node.args[1:], **node.kwargs)
            if same_metadata(value_of(total), value_of(node)):
                replace(node, total)
                return True
            return False
        moved = self._moved(node, source, chosen)
        if moved is None:
            return self._flatten(node, source, chosen)
        known = {n: self.parts[n][1] for n in sources}
        if any(self.parts[n][0] != chosen for n in sources) or not self._keeps_zeros(node):
            return False
        result = select_inputs(node, _Part(moved.dim, moved.start, moved.end, known), call)
        if result is not None:
            self.parts[node] = (moved, result)
        return False

    def _moved(self, node: fx.Node, source: fx.Node, chosen: Selection) -> Selection | None:
        """Return the position of the slice in the result."""
        before, after = shape_of(source) or (), shape_of(node) or ()
        dim: int | None
        if is_call(node, *RESHAPES):
            dim = kept_dimension(before, after, chosen.dim)
        elif is_call(node, aten.permute.default):
            order: Any = node.args[1]
            dim = [d % len(after) for d in order].index(chosen.dim)
        elif len(before) == len(after) and before[chosen.dim] == after[chosen.dim]:
            dim = chosen.dim
        else:
            return None
        return None if dim is None else Selection(dim, chosen.start, chosen.end)

    def _keeps_zeros(self, node: fx.Node) -> bool:
        args = node.args
        if node.target in _LINEAR or is_call(node, *RESHAPES, aten.permute.default, aten.mul.Tensor):
            return node.kwargs.get("memory_format") in (None, torch.contiguous_format, torch.preserve_format)
        if is_call(node, aten.sum.dim_IntList, aten.mean.dim):
            return True
        if is_call(node, aten.div.Tensor):
            return args[1] not in self.parts
        if is_call(node, aten.add.Tensor, aten.sub.Tensor):
            return args[0] in self.parts and args[1] in self.parts
        if str(node.target) == "prims.fma.default":  # not in every version of torch
            return args[2] in self.parts and (args[0] in self.parts or args[1] in self.parts)
        if is_call(node, aten.where.self):
            return args[0] not in self.parts and all(a in self.parts or is_zeros_like(a) for a in args[1:])
        return False

    def _flatten(self, node: fx.Node, source: fx.Node, chosen: Selection) -> bool:
        before, after = shape_of(source) or (), shape_of(node) or ()
        if (
            is_call(node, *RESHAPES)
            and len(after) == 2
            and after[1] == before[-1]
            and chosen.dim < len(before) - 1
        ):
            self.flat[node] = (chosen, self.parts[source][1], list(before[:-1]))
        return False

    def _step_flat(self, node: fx.Node) -> bool:
        """Handle a user of a matrix whose rows are those of a value that is zero outside a slice."""
        matrix = next(n for n in node.all_input_nodes if n in self.flat)
        chosen, part, outer = self.flat[matrix]
        call = calls_before(node, like=node)
        columns = value_of(matrix).shape[1]
        if untransposed(node) is not None:
            changed = False
            for matmul in list(node.users):
                changed |= self._contract(matmul, node, matrix)
            erase_unused(node)
            return changed
        rows = [math.prod(value_of(part).shape[:-1]), columns]
        if is_call(node, aten.sum.dim_IntList) and _dims(node, matrix) == [0]:
            replace(node, call(node.target, reshape(part, rows, call), *node.args[1:], **node.kwargs))
            return True
        if not is_call(node, aten.mm.default) or node.args[0] is not matrix or node.args[1] is matrix:
            return False
        matmul = call(aten.mm.default, reshape(part, rows, call), node.args[1])
        result = call(aten.view.default, matmul, [*value_of(part).shape[:-1], value_of(node).shape[1]])
        self.flat[node] = (chosen, result, outer)
        for view in node.users:
            if is_call(view, *RESHAPES) and list(shape_of(view) or ())[:-1] == outer:
                self.parts[view] = (chosen, result)
        return True

    def _contract(self, matmul: fx.Node, flipped: fx.Node, matrix: fx.Node) -> bool:
        """Handle ``mm(permute(rows), x)``: rows of ``x`` that meet zeros do not count."""
        if not is_call(matmul, aten.mm.default) or matmul.args[0] is not flipped or matmul.args[1] is flipped:
            return False
        chosen, part, outer = self.flat[matrix]
        other: Any = matmul.args[1]
        if shape_of(other) is None:
            return False
        call = calls_before(matmul, like=matmul)
        columns = value_of(other).shape[1]
        whole: Any = other.args[0] if is_call(other, *RESHAPES) else None
        if list(shape_of(whole) or ()) != [*outer, columns]:
            if not value_of(other).is_contiguous():
                return False
            whole = call(aten.view.default, other, [*outer, columns])
        count = math.prod(value_of(part).shape[:-1])
        met = reshape(chosen.of(whole, call), [count, columns], call)
        left = reshape(part, [count, value_of(part).shape[-1]], call)
        replace(matmul, call(aten.mm.default, call(aten.permute.default, left, [1, 0]), met))
        return True


_FOLLOWED = (
    aten.permute.default,
    aten.mul.Tensor,
    aten.where.self,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.div.Tensor,
)


def is_zeros_like(node: Any) -> bool:
    """Whether a value is 0, as a tensor of any shape."""
    scalar = is_call(node, aten.scalar_tensor.default) and node.args[0] in (0, 0.0)
    return scalar or is_zeros(node)


def _dims(node: fx.Node, source: fx.Node) -> list[int]:
    dims: Any = node.args[1] if len(node.args) > 1 else None
    rank = value_of(source).dim()
    return [d % rank for d in dims] if dims else list(range(rank))


def _is_dead(node: fx.Node) -> bool:
    return node.op != "output" and not node.users


def _scatter(part: fx.Node, chosen: Selection, like: fx.Node, shape: list[int] | None = None) -> fx.Node:
    """Return the whole value, zeros included, or its rows in another shape."""
    value = value_of(like)
    call = calls_before(like, like=like)
    zeros = call(aten.full.default, shape or list(value.shape), 0, dtype=value.dtype, device=value.device)
    whole = call(aten.slice_scatter.default, zeros, part, chosen.dim, chosen.start, chosen.end)
    return whole if shape or same_metadata(value_of(whole), value) else restride(whole, value, call)
