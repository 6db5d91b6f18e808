"""Apply linear layers and 1x1 convolutions before their inputs are gathered or upsampled."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxpasses.graphs.aliasing import AliasInfo
from fxpasses.graphs.rewriting import replace, same_metadata, value_of
from fxpasses.pass_manager.pass_base import Contract, Pass
from fxpasses.pass_manager.sites import claim
from fxpasses.passes._featurewise import Features, Step, step_of
from fxpasses.passes._matching import (
    RESHAPES,
    calls_before,
    find_calls,
    is_call,
    restride,
    returned_values,
    shape_of,
    update_values,
)
from fxpasses.passes._options import require_at_least
from fxpasses.passes._rowwise import reshape

aten = torch.ops.aten

Call = Callable[..., fx.Node]

_ELEMENT = 4.0
"""The cost of an element of a pointwise call, which is fused with others, in multiplications of a matmul."""


@dataclass(frozen=True)
class MoveMatmulBeforeGather(Pass):
    """Multiply each row of an input before rows are gathered, instead of each gathered row.

    A layer on the edges of a graph, ``linear(cat([x[source], x[target]], -1))``, multiplies the features of a
    node once for each of its edges. A 1x1 convolution of images that were upsampled to one size and
    concatenated multiplies each pixel of a small image many times. Gathers, interpolation, slices and sums of
    rows treat all features alike, so the layer can be applied first, each part of the weight to its input.

    Before::

        edges = aten.cat([aten.index(x, [source]), aten.index(x, [target])], -1)   # x: f32[100, 32]
        y = aten.mm(edges, weight)                                                  # edges: f32[600, 64]

    After::

        y_0 = aten.index(aten.mm(x, weight[:32]), [source])
        y_1 = aten.index(aten.mm(x, weight[32:]), [target])
        y = aten.add(y_0, y_1)

    Applies to inference graphs, in float32 and float64: in low precision, sums of rounded parts would be less
    precise. Equal up to rounding.

    Attributes:
        gain: minimum ratio of the cost before and after: multiplications of matmuls, and elements of the
            calls that move behind them.
    """

    name: ClassVar[str] = "move_matmul_before_gather"
    contract: ClassVar[Contract] = Contract(("inference",), numerics="tolerance")
    gain: float = 1.25

    def __post_init__(self) -> None:
        require_at_least(self, gain=0.0)

    def apply(self, gm: fx.GraphModule) -> bool:
        aliases = AliasInfo(gm.graph)
        changed = False
        for node in find_calls(gm.graph, aten.mm.default, aten.addmm.default, aten.convolution.default):
            layer = _layer(node)
            if layer is None:
                continue
            placement = _Placement(layer)
            if placement.step_after(layer.features) is None or placement.gain < self.gain:
                continue
            if any(aliases.roots(n) & aliases.mutated for n in placement.reads()) or not claim(node):
                continue
            returned = returned_values(gm.graph)
            update_values(gm, [_apply(layer, placement)], returned)
            aliases, changed = AliasInfo(gm.graph), True
        return changed


@dataclass(frozen=True)
class _Layer:
    """A layer that maps the features of each row.

    Attributes:
        node: the call.
        features: its input.
        weight: the weight, a matrix ``[in, out]``, or that of a convolution ``[out, in, 1, ..]``.
        bias: the bias, if any.
    """

    node: fx.Node
    features: Features
    weight: fx.Node
    bias: fx.Node | None

    @property
    def is_convolution(self) -> bool:
        return self.node.target is aten.convolution.default

    @property
    def outputs(self) -> int:
        return value_of(self.weight).shape[0 if self.is_convolution else 1]


def _layer(node: fx.Node) -> _Layer | None:
    if node.kwargs or any(shape_of(n) is None for n in (node, *node.all_input_nodes)):
        return None
    if value_of(node).dtype not in (torch.float32, torch.float64):
        return None
    if any(value_of(n).numel() == 0 for n in node.all_input_nodes):
        return None
    args: tuple[Any, ...] = node.args
    if node.target is not aten.convolution.default:
        bias = args[0] if node.target is aten.addmm.default else None
        return _Layer(node, Features(args[-2], 1, (0, value_of(args[-2]).shape[1])), args[-1], bias)
    x, weight, bias, stride, padding, _, is_transposed, _, groups = args
    kernel = value_of(weight).shape[2:]
    if is_transposed or groups != 1 or {*kernel, *stride} != {1} or any(padding):
        return None
    if value_of(x).dim() != len(kernel) + 2:
        return None  # without a batch dimension
    return _Layer(node, Features(x, 1, (0, value_of(x).shape[1])), weight, bias)


class _Placement:
    """Decides before which calls the layer is applied.

    Args:
        layer: the layer.

    Attributes:
        order: what is computed anew, inputs first.
        gain: how many times less that costs than the layer and the calls before it that nothing else reads.
    """

    def __init__(self, layer: _Layer) -> None:
        self._outputs = layer.outputs
        self._steps: dict[Features, Step | None] = {}
        self._parents: dict[Features, int] = {}
        self._explore(layer.features)
        self._nodes = {layer.node, *(features.node for features in self._steps)}
        costs: dict[Features, float] = {}
        self._applied = {
            features for features in self._inputs_first(layer.features) if self._is_best_here(features, costs)
        }
        self.order = self._inputs_first(layer.features)
        before, after, unused = self._multiplications(layer.features), 0.0, {layer.node}
        for features in reversed(self.order):
            step = self.step_after(features)
            after += self._multiplications(features) if step is None else self._elements(features, step)
            if step is not None and features.node not in unused and unused.issuperset(features.node.users):
                unused.add(features.node)
                before += self._elements(features, step) * features.size / self._outputs
        self.gain = before / max(after, 1.0)

    def step_after(self, features: Features) -> Step | None:
        """Return the call that follows the layer, or None if the layer is applied to ``features`` themselves."""
        return None if features in self._applied else self._steps[features]

    def reads(self) -> list[fx.Node]:
        """Return the tensors that may be read later than before."""
        return [node for features in self._steps for node in (features.node, *features.node.all_input_nodes)]

    def _explore(self, root: Features) -> None:
        self._applied = set[Features]()
        pending = [root]
        while pending:
            features = pending.pop()
            if features not in self._steps:
                step = self._steps[features] = step_of(features)
                for given in step.inputs if step is not None else ():
                    self._parents[given] = self._parents.get(given, 0) + 1
                    pending.append(given)

    def _inputs_first(self, root: Features) -> list[Features]:
        found: dict[Features, None] = {}
        pending = [root]
        while pending:
            features = pending[-1]
            step = self.step_after(features)
            missing = [given for given in (step.inputs if step is not None else ()) if given not in found]
            if missing:
                pending.extend(reversed(missing))
            else:
                found[pending.pop()] = None
        return list(found)

    def _is_best_here(self, features: Features, costs: dict[Features, float]) -> bool:
        """Whether to apply the layer to ``features`` rather than to what they are computed from."""
        here, step = self._multiplications(features), self._steps[features]
        before = math.inf
        if step is not None:
            # What several calls read is computed once for all of them.
            before = sum(costs[given] / self._parents[given] for given in step.inputs)
            before += self._elements(features, step)
            if self._nodes.issuperset(features.node.users):
                before -= self._elements(features, step) * features.size / self._outputs
        costs[features] = min(here, before)
        return here <= before

    def _multiplications(self, features: Features) -> float:
        return float(features.rows * features.size * self._outputs)

    def _elements(self, features: Features, step: Step) -> float:
        """The cost of a call on as many features as the layer has outputs."""
        calls = 0 if step.is_view else max(1, len(step.inputs) - 1)
        return _ELEMENT * calls * max(given.rows for given in (features, *step.inputs)) * self._outputs


def _apply(layer: _Layer, placement: _Placement) -> fx.Node:
    call = calls_before(layer.node)
    made: dict[Features, fx.Node] = {}
    for features in placement.order:
        step = placement.step_after(features)
        if step is None:
            made[features] = _multiplied(layer, features, call)
        else:
            made[features] = step.rebuild([made[given] for given in step.inputs], layer.outputs, call)
    result = made[layer.features]
    if layer.bias is not None:
        bias = layer.bias
        if layer.is_convolution:
            ones = [1] * (value_of(result).dim() - 2)
            bias = call(aten.view.default, bias, [layer.outputs, *ones])
        result = call(aten.add.Tensor, result, bias)
    old = value_of(layer.node)
    if not same_metadata(value_of(result), old) and _is_viewed(layer.node):
        result = restride(result, old, call)
    replace(layer.node, result)
    return result


def _is_viewed(node: fx.Node) -> bool:
    """Whether a view is made of a value, or of what is computed from it: it may need the strides of now."""
    pending, seen = [node], {node}
    while pending:
        users = pending.pop().users.keys() - seen
        if any(is_call(user, *RESHAPES, aten.as_strided.default) for user in users):
            return True
        seen |= users
        pending.extend(users)
    return False


def _multiplied(layer: _Layer, features: Features, call: Call) -> fx.Node:
    """Apply the layer's part of the weight to features, last in memory, so that gathers read whole rows."""
    node, dim, (start, end) = features.node, features.dim, features.part
    value = value_of(node)
    weight = layer.weight
    whole = end - start == layer.features.size
    if layer.is_convolution:
        weight = call(aten.view.default, weight, list(value_of(weight).shape[:2]))
        weight = call(aten.permute.default, weight, [1, 0])
    part = weight if whole else call(aten.slice.Tensor, weight, 0, start, end)
    order = [d for d in range(value.dim()) if d != dim]
    last = node if dim == value.dim() - 1 else call(aten.permute.default, node, [*order, dim])
    rows = [value.shape[d] for d in order]
    product = call(aten.mm.default, reshape(last, [math.prod(rows), end - start], call), part)
    result = call(aten.view.default, product, [*rows, layer.outputs])
    if last is node:
        return result
    back = list(range(len(order)))
    return call(aten.permute.default, result, [*back[:dim], len(order), *back[dim:]])
