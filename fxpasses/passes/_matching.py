"""Questions that several passes ask of a graph, and helpers that insert and move calls."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import torch
from torch import fx
from torch.fx.node import map_arg

from fake.seam.dispatch import OpOverload, disable_current_modes
from fake.seam.fake_tensor import FakeTensor
from fxpasses.graphs.aliasing import has_effect, is_mutating, is_random
from fxpasses.graphs.rewriting import insert_call, outputs_of, replace, same_metadata, value_of
from fxpasses.pass_manager.node_metadata import refresh

aten, prims = torch.ops.aten, torch.ops.prims

RESHAPES = (aten.view.default, aten._unsafe_view.default)

FACTORIES = {
    aten.full.default,
    aten.zeros.default,
    aten.ones.default,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.scalar_tensor.default,
    aten.linspace.default,
    aten.eye.default,
    prims.iota.default,
}
"""Operators that make constants of numbers alone."""
_MOST_ELEMENTS = 1 << 22
_FILLED = {aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2}
_ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}


def is_call(node: Any, *targets: Any) -> TypeGuard[fx.Node]:
    """Whether ``node`` is a node that calls one of ``targets``."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def find_calls(graph: fx.Graph, *targets: Any) -> list[fx.Node]:
    """The calls of ``targets``, in the order of the graph."""
    return [node for node in graph.nodes if is_call(node, *targets)]


def calls_before(anchor: fx.Node, like: fx.Node | None = None) -> Callable[..., fx.Node]:
    """A function ``call(target, *args, **kwargs)`` that inserts calls before ``anchor``.

    The new nodes have ``like``'s provenance, or else ``anchor``'s.
    """

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with anchor.graph.inserting_before(anchor):
            return insert_call(anchor.graph, target, args, kwargs, like=like or anchor)

    return call


def shape_of(node: Any) -> tuple[int, ...] | None:
    """The sizes of a tensor when all of them are numbers, or else None."""
    value = value_of(node) if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(value.shape)


def transposed(node: fx.Node, call: Callable[..., fx.Node]) -> fx.Node:
    """The transpose of a matrix: what it is the transpose of, or a new node."""
    source = untransposed(node)
    return source if source is not None else call(aten.permute.default, node, [1, 0])


def untransposed(node: fx.Node) -> fx.Node | None:
    """The matrix that ``node`` is the transpose of, or None."""
    if is_call(node, aten.permute.default) and list(node.args[1]) in ([1, 0], [-1, -2]):  # type: ignore[arg-type]
        return node.args[0]  # type: ignore[return-value]
    if is_call(node, aten.t.default):
        return node.args[0]  # type: ignore[return-value]
    return None


def is_zeros(node: Any) -> bool:
    """Whether every element of the node's value is 0 (not -0.0), whatever the inputs are."""
    if is_call(node, *_FILLED):
        position = _FILLED[node.target]  # type: ignore[index]
        fill = node.args[position] if len(node.args) > position else None
        return isinstance(fill, (bool, int, float)) and fill == 0 and math.copysign(1, fill) > 0
    return is_call(node, *_ZEROS)


def is_pure(node: fx.Node) -> bool:
    """Whether a call neither writes, nor calls the RNG, nor has an effect: it may be moved or repeated."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function":
        return False
    if not isinstance(node.target, OpOverload):
        return getattr(node.target, "__module__", None) in ("_operator", "builtins", "math", "torch.sym")
    return not (is_mutating(node) or is_random(node) or has_effect(node) or node.is_impure())


def bring_before(nodes: Iterable[fx.Node], anchor: fx.Node) -> bool:
    """Move ``nodes``, with all that they need, before ``anchor``; False, and nothing moved, where that is impossible.

    See :func:`needed_before`. The graph must not write to what is read (see :class:`~fxpasses.graphs.aliasing.AliasInfo`).
    """
    late = needed_before(nodes, anchor)
    for node in sorted(late or ()):
        anchor.prepend(node)
    return late is not None


def needed_before(nodes: Iterable[fx.Node], anchor: fx.Node) -> set[fx.Node] | None:
    """The calls that have to move before ``anchor`` for ``nodes`` to be computed there; None when they cannot.

    They cannot when one of them depends on ``anchor``, or on a later call that writes or has an effect. RNG calls move
        together with those that come before them: they keep their order.
    """
    late: set[fx.Node] = set()
    stack = [node for node in nodes if not node < anchor]
    while stack:
        node = stack.pop()
        if node in late:
            continue
        if node is anchor or not (is_pure(node) or only_samples(node)):
            return None
        late.add(node)
        stack.extend(n for n in node.all_input_nodes if not n < anchor)
        if is_random(node):
            earlier = node.prev
            while earlier is not anchor and not is_random(earlier):
                earlier = earlier.prev
            if earlier is not anchor or is_random(anchor):
                stack.append(earlier)
    return late


def only_samples(node: fx.Node) -> bool:
    return is_random(node) and not is_mutating(node) and not has_effect(node)


def slice_bounds(node: fx.Node) -> tuple[int, int, int] | None:
    """Dimension, start and end of a slice with step 1, as plain numbers counted from the front, or None."""
    arguments: list[Any] = [*node.args[1:], None, None, None, None]
    dim, start, end, step = arguments[:4]
    source = value_of(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    if source is None or step not in (None, 1):
        return None
    dim = (dim or 0) % source.dim()  # type: ignore[operator]
    size = source.shape[dim]
    start = 0 if start is None else start
    end = size if end is None else end
    if not all(isinstance(n, int) for n in (size, start, end)):
        return None
    start, end = (max(0, n + size) if n < 0 else min(n, size) for n in (start, end))
    return (dim, start, end) if start <= end else None


def returned_values(graph: fx.Graph) -> list[Any]:
    """The fake values that the graph returns, to hand to :func:`update_values` after a rewrite."""
    return [value_of(n) if isinstance(n, fx.Node) else n for n in outputs_of(graph)]


def update_values(gm: fx.GraphModule, changed: Iterable[fx.Node], returned: list[Any]) -> None:
    """Recompute the fake values that depend on ``changed``, after a rewrite that changed strides.

    What the graph returns keeps the strides that it had: it is viewed, or copied, where needed.

    Args:
        gm: the graph.
        changed: nodes whose values are right already.
        returned: the fake values that the graph returned before.
    """
    nodes = set(changed)
    refresh(gm, {user for node in nodes for user in node.users if user.op != "output"})
    (output,) = gm.graph.find_nodes(op="output")
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for position, (node, wanted) in enumerate(zip(results, returned, strict=True)):
        if isinstance(wanted, torch.Tensor) and not same_metadata(value_of(node), wanted):
            results[position] = restride(node, wanted, calls_before(output, like=node))
    output.args = (type(output.args[0])(results),)  # type: ignore[arg-type,operator]


def restride(node: fx.Node, wanted: torch.Tensor, call: Callable[..., fx.Node]) -> fx.Node:
    """A node's value in other strides.

    Args:
        node: the node.
        wanted: a fake tensor with these strides, and the same shape and dtype.
        call: inserts a call.
    """
    size, stride = list(wanted.shape), list(wanted.stride())
    differing = [n for n, a, b in zip(size, stride, value_of(node).stride(), strict=True) if a != b]
    if all(isinstance(n, int) and n == 1 for n in differing):
        return call(aten.as_strided.default, node, size, stride)
    empty = call(aten.empty_strided.default, size, stride, dtype=wanted.dtype, device=wanted.device)
    return call(aten.copy.default, empty, node)


def replace_results(old: fx.Node, new: fx.Node) -> dict[int, fx.Node]:
    """Let those who take apart the results of ``old`` take apart those of ``new``; the new nodes by position."""
    found: dict[int, fx.Node] = {}
    for item in list(old.users):
        position = item.args[1]
        assert isinstance(position, int)
        found[position] = calls_before(item)(operator.getitem, new, position)
        replace(item, found[position])
    old.graph.erase_node(old)
    return found


def erase_unused(node: fx.Node) -> None:
    """Erase a pure call that nobody uses."""
    if node.op == "call_function" and not node.users and is_pure(node):
        node.graph.erase_node(node)


def constant_value(gm: fx.GraphModule, node: fx.Node) -> torch.Tensor | None:
    """The value of a node that depends on factories of constants alone and has numbers for sizes, or None; also for one
    that is made of a value with more elements than :data:`_MOST_ELEMENTS`."""
    known: dict[fx.Node, torch.Tensor | None] = {}

    def evaluate(node: fx.Node) -> torch.Tensor | None:
        if node not in known:
            known[node] = _evaluate(gm, node, evaluate)
        return known[node]

    return evaluate(node)


def constant_range(gm: fx.GraphModule, node: fx.Node) -> range | None:
    """The consecutive integers that a constant node counts along its last dimension, the only one above 1, or None."""
    shape = shape_of(node)
    if not shape or not shape[-1] or any(size != 1 for size in shape[:-1]):
        return None
    value = constant_value(gm, node)
    if value is None or value.dtype is torch.bool or value.is_complex():
        return None
    with disable_current_modes():
        flat = value.flatten()
        start = int(flat[0])
        counted = range(start, start + shape[-1])
        wanted = torch.arange(counted.start, counted.stop, dtype=value.dtype)
        return counted if torch.equal(flat, wanted) else None


def _evaluate(gm: fx.GraphModule, node: fx.Node, evaluate: Callable[[fx.Node], Any]) -> torch.Tensor | None:
    fake, shape = value_of(node), shape_of(node)
    if node.op == "get_attr":
        # Only what the constant folding pass has made: anything else may be written to between calls.
        attribute = getattr(gm, str(node.target), None) if str(node.target).startswith("_folded_") else None
        return attribute if isinstance(attribute, torch.Tensor) else None
    if shape is None or math.prod(shape) > _MOST_ELEMENTS or not isinstance(fake, FakeTensor):
        return None
    if not is_pure(node) or not isinstance(node.target, OpOverload) or fake.device.type != "cpu":
        return None
    if not node.all_input_nodes and node.target not in FACTORIES:
        return None
    values = {n: evaluate(n) for n in node.all_input_nodes}
    if any(value is None for value in values.values()):
        return None
    with disable_current_modes(), torch.no_grad():
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n])
        return node.target(*args, **kwargs)


def is_float32_on_cpu(node: Any, dims: int) -> bool:
    """Whether it is a node whose value is a strided tensor of float32 on the CPU, of so many dimensions."""
    value = value_of(node) if isinstance(node, fx.Node) else None
    return (
        isinstance(value, torch.Tensor)
        and value.dtype is torch.float32
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and value.dim() == dims
    )
