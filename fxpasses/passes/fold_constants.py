"""Constant folding: compute values once that would be the same in every call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.node import map_arg

from fake.dispatch.communication import communicates
from fake.seam.dispatch import OpOverload, disable_current_modes
from fake.seam.fake_tensor import FakeTensor
from fake.seam.fx import has_effects
from fxpasses.graphs.aliasing import AliasInfo, is_alias, is_mutating, is_random
from fxpasses.graphs.rewriting import fake_mode_of, insert_call, replace, value_of
from fxpasses.pass_manager.pass_base import Contract, Pass
from fxpasses.pass_manager.sites import claim
from fxpasses.passes._matching import FACTORIES
from fxpasses.passes._options import require_at_least

aten = torch.ops.aten

_CONSTANT_SOURCES = FACTORIES | {aten.lift_fresh_copy.default}
"""Calls that are already constants, so that there is nothing to fold."""

_CHEAP = {
    aten._to_copy.default, aten.where.self, aten.neg.default, aten.abs.default,
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar,
}  # fmt: skip
"""Calls that a kernel fuses for free, also in floating point."""


@dataclass(frozen=True)
class FoldConstants(Pass):
    """Replace calls that depend only on constants by their value.

    Constants are results of factory operators (``full``, ``arange``) and tensors that are part of the graph.
    Parameters, buffers and inputs are not: a training step changes them. A value whose elements are all equal
    becomes ``full``. Any other becomes a tensor attribute of the graph, unless it is larger than
    ``max_bytes``, or computing it inside a kernel is cheaper: it takes fewer than ``min_calls`` calls, or
    only arithmetic on positions. A compiler emits those as loop indices, and indexing with them needs no
    gather.

    Before::

        ones = aten.full([4, 4], 1.0)
        scale = aten.mul(ones, 0.5)
        return aten.mul(x, scale)

    After::

        scale = aten.full([4, 4], 0.5)
        return aten.mul(x, scale)

    Attributes:
        max_bytes: maximum size of a tensor that may become an attribute, in bytes.
        min_calls: minimum number of calls that such an attribute must save.
    """

    name: ClassVar[str] = "fold_constants"
    contract: ClassVar[Contract] = Contract(
        ("joint", "inference"), invalidates="no_dead_code", metadata="exact"
    )
    max_bytes: int = 65536
    min_calls: int = 4

    def __post_init__(self) -> None:
        require_at_least(self, max_bytes=0, min_calls=0)

    def apply(self, gm: fx.GraphModule) -> bool:
        aliases = AliasInfo(gm.graph)
        constants: dict[fx.Node, torch.Tensor] = {}
        calls: dict[fx.Node, set[fx.Node]] = {}
        for node in gm.graph.nodes:
            if node in aliases.mutated or is_written(node, aliases):
                continue
            value = self._evaluate(gm, node, constants)
            if value is not None:
                constants[node] = value
                calls[node] = {node}.union(*(calls[n] for n in node.all_input_nodes))
        changed = False
        for node in constants:
            # Only constants used by a non-constant call are worth keeping.
            if (
                node.op == "get_attr"
                or node.target in _CONSTANT_SOURCES
                or constants.keys() >= node.users.keys()
            ):
                continue
            if aliases.roots(node) & aliases.output and len(aliases.roots(node) - {node}):
                continue  # a returned view of another value must stay a view
            fill = _uniform_value(constants[node])
            # Lifting an attribute into the graph makes a contiguous copy of it.
            small = constants[node].is_contiguous() and constants[node].nbytes <= self.max_bytes
            small = small and len(calls[node]) >= self.min_calls and not all(map(_is_cheap, calls[node]))
            if not (fill is not None or small) or not claim(node):
                continue
            if fill is not None:
                _replace_by_full(gm, node, constants[node], fill)
            else:
                _replace_by_attribute(gm, node, constants[node])
            changed = True
        return changed

    def _evaluate(
        self, gm: fx.GraphModule, node: fx.Node, known: dict[fx.Node, torch.Tensor]
    ) -> torch.Tensor | None:
        """Return the value of a node that depends only on constants, or None."""
        fake = value_of(node)
        if node.op == "get_attr":
            attribute: Any = getattr(gm, str(node.target), None)
            plain = type(attribute) is torch.Tensor and attribute.layout is torch.strided
            return (
                attribute
                if plain and not attribute.requires_grad and attribute.nbytes <= self.max_bytes
                else None
            )
        if (
            node.op != "call_function"
            or not isinstance(node.target, OpOverload)
            or not isinstance(fake, FakeTensor)
        ):
            return None
        if fake.device.type != "cpu" or not _is_static(fake) or fake.layout is not torch.strided:
            return None  # on an accelerator, evaluating here would synchronize with the device
        if fake.numel() * fake.element_size() > 16 * self.max_bytes or fake.dtype.is_complex:
            return None
        inputs = node.all_input_nodes
        if any(n not in known for n in inputs) or (not inputs and node.target not in FACTORIES):
            return None
        if is_mutating(node) or is_random(node) or has_effects(node.target) or communicates(node.target):
            return None  # the result of a collective depends on what other ranks send
        with disable_current_modes(), torch.no_grad():
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: known[n])
            return node.target(*args, **kwargs)


def is_written(node: fx.Node, aliases: AliasInfo) -> bool:
    """Whether the graph writes to the memory behind ``node``."""
    return node.op != "output" and bool(aliases.roots(node) & aliases.mutated)


def _is_static(fake: torch.Tensor) -> bool:
    return all(isinstance(s, int) for s in (*fake.shape, *fake.stride(), fake.storage_offset()))


def _is_cheap(node: fx.Node) -> bool:
    """Whether a kernel computes a call from its loop index for free: views, pointwise integer calls."""
    if node.op == "get_attr" or node.target in _CONSTANT_SOURCES | _CHEAP or is_alias(node):
        return True
    value = value_of(node)
    whole = not (value.is_floating_point() or value.is_complex())
    return whole and isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def _uniform_value(value: torch.Tensor) -> bool | int | float | None:
    """Return the number that every element equals, or None."""
    if value.numel() == 0 or value.dtype.is_complex or not value.is_contiguous():
        return None
    with disable_current_modes():
        first = value.flatten()[0]
        if value.is_floating_point() and bool((torch.signbit(value) != torch.signbit(first)).any()):
            return None  # -0.0 equals 0.0 but is not the same
        return first.item() if bool((value == first).all()) else None


def _replace_by_full(
    gm: fx.GraphModule, node: fx.Node, value: torch.Tensor, fill: bool | int | float
) -> None:
    options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    with gm.graph.inserting_before(node):
        full = insert_call(gm.graph, aten.full.default, (list(value.shape), fill), options, like=node)
    replace(node, full)


def _replace_by_attribute(gm: fx.GraphModule, node: fx.Node, value: torch.Tensor) -> None:
    name = f"_folded_{node.name}"
    # Clone: the evaluated tensor may be a view of, or be, another constant.
    with disable_current_modes():
        gm.register_buffer(name, value.clone(), persistent=False)
    with gm.graph.inserting_before(node):
        attribute = gm.graph.get_attr(name)
    attribute.meta = dict(node.meta)
    mode = fake_mode_of(gm.graph)
    attribute.meta["val"] = mode.from_tensor(getattr(gm, name), static_shapes=True)
    # As for AOTAutograd's own constants: fake tensor modes accept a real tensor only through this call.
    with gm.graph.inserting_before(node):
        lifted = insert_call(gm.graph, aten.lift_fresh_copy.default, (attribute,), like=node)
    replace(node, lifted)
