"""Graph queries shared by several passes, and helpers that insert and move calls."""

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
"""Operators that make constants from numbers alone."""
_MOST_ELEMENTS = 1 << 22
_FILLED = {aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2}
_ZEROS = {aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default}


def is_call(node: Any, *targets: Any) -> TypeGuard[fx.Node]:
    """Whether ``node`` is a node that calls one of ``targets``."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def find_calls(graph: fx.Graph, *targets: Any) -> list[fx.Node]:
    """Return the calls of ``targets``, in graph order."""
    return [node for node in graph.nodes if is_call(node, *targets)]


def calls_before(anchor: fx.Node, like: fx.Node | None = None) -> Callable[..., fx.Node]:
    """Return a function ``call(target, *args, **kwargs)`` that inserts calls before ``anchor``.

    New nodes inherit the provenance of ``like``, or else of ``anchor``.
    """

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with anchor.graph.inserting_before(anchor):
            return insert_call(anchor.graph, target, args, kwargs, like=like or anchor)

    return call


def shape_of(node: Any) -> tuple[int, ...] | None:
    """Return the sizes of a tensor if all are integers, else None."""
    value = value_of(node) if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not all(isinstance(size, int) for size in value.shape):
        return None
    return tuple(value.shape)


def transposed(node: fx.Node, call: Callable[..., fx.Node]) -> fx.Node:
    """Return the transpose of a matrix: its source if it is itself a transpose, else a new node."""
    source = untransposed(node)
    return source if source is not None else call(aten.permute.default, node, [1, 0])


def untransposed(node: fx.Node) -> fx.Node | None:
    """Return the matrix that ``node`` transposes, or None."""
    if is_call(node, aten.permute.default) and list(node.args[1]) in ([1, 0], [-1, -2]):  # type: ignore[arg-type]
        return node.args[0]  # type: ignore[return-value]
    if is_call(node, aten.t.default):
        return node.args[0]  # type: ignore[return-value]
    return None


def is_zeros(node: Any) -> bool:
    """Whether every element of the node's value is 0 (not -0.0) for any inputs."""
    if is_call(node, *_FILLED):
        position = _FILLED[node.target]  # type: ignore[index]
        fill = node.args[position] if len(node.args) > position else None
        return isinstance(fill, (bool, int, float)) and fill == 0 and math.copysign(1, fill) > 0
    return is_call(node, *_ZEROS)


def is_pure(node: fx.Node) -> bool:
    """Whether a call writes nothing, uses no RNG and has no effects, so that it may be moved or repeated."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function":
        return False
    if not isinstance(node.target, OpOverload):
        return getattr(node.target, "__module__", None) in ("_operator", "builtins", "math", "torch.sym")
    return not (is_mutating(node) or is_random(node) or has_effect(node) or node.is_impure())


def move_before(nodes: Iterable[fx.Node], anchor: fx.Node) -> bool:
    """Move ``nodes``, with their inputs, before ``anchor``. If impossible, move nothing and return False.

    See :func:`needed_before`. The graph must not write to what they read (see
    :class:`~fxpasses.graphs.aliasing.AliasInfo`).
    """
    late = needed_before(nodes, anchor)
    for node in sorted(late or ()):
        anchor.prepend(node)
    return late is not None


def needed_before(nodes: Iterable[fx.Node], anchor: fx.Node) -> set[fx.Node] | None:
    """Return the calls that must move before ``anchor`` to compute ``nodes`` there; None if impossible.

    It is impossible if one of them depends on ``anchor``, or on a later call that writes or has effects. RNG
    calls move together with the RNG calls before them, to keep their order.
    """
    late: set[fx.Node] = set()
    stack = [node for node in nodes if not node < anchor]
    while stack:
        node = stack.pop()
        if node in late:
            continue
        if node is anchor or not (is_pure(node) or is_pure_rng_call(node)):
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


def is_pure_rng_call(node: fx.Node) -> bool:
    return is_random(node) and not is_mutating(node) and not has_effect(node)


def slice_bounds(node: fx.Node) -> tuple[int, int, int] | None:
    """Return dimension, start and end of a slice with step 1, as non-negative integers, or None."""
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
    """Return the fake values of the graph's outputs, for :func:`update_values` after a rewrite."""
    return [value_of(n) if isinstance(n, fx.Node) else n for n in outputs_of(graph)]


def update_values(gm: fx.GraphModule, changed: Iterable[fx.Node], returned: list[Any]) -> None:
    """Recompute the fake values that depend on ``changed``, after a rewrite that changed strides.

    Outputs of the graph keep their strides: they are viewed or copied if needed.

    Args:
        gm: the graph.
        changed: nodes whose values are already correct.
        returned: the fake values of the outputs before the rewrite.
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
    """Return a node's value with other strides.

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
    """Make users that unpack ``old`` unpack ``new``, and return the new nodes by position."""
    found: dict[int, fx.Node] = {}
    for item in list(old.users):
        position = item.args[1]
        assert isinstance(position, int)
        found[position] = calls_before(item)(operator.getitem, new, position)
        replace(item, found[position])
    old.graph.erase_node(old)
    return found


def erase_unused(node: fx.Node) -> None:
    """Erase a pure call without users."""
    if node.op == "call_function" and not node.users and is_pure(node):
        node.graph.erase_node(node)


def constant_value(gm: fx.GraphModule, node: fx.Node) -> torch.Tensor | None:
    """Return the value of a static-size node that depends only on constant factories, or None.

    Also None if it is computed from a value with more than :data:`_MOST_ELEMENTS` elements.
    """
    known: dict[fx.Node, torch.Tensor | None] = {}

    def evaluate(node: fx.Node) -> torch.Tensor | None:
        if node not in known:
            known[node] = _evaluate(gm, node, evaluate)
        return known[node]

    return evaluate(node)


def constant_range(gm: fx.GraphModule, node: fx.Node) -> range | None:
    """Return the consecutive integers in the last dimension (the only one above 1) of a constant, or None."""
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
        # Only attributes made by constant folding: any other may be written to between calls.
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
    """Whether a node's value is a strided float32 tensor on the CPU with ``dims`` dimensions."""
    value = value_of(node) if isinstance(node, fx.Node) else None
    return (
        isinstance(value, torch.Tensor)
        and value.dtype is torch.float32
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and value.dim() == dims
    )
