"""Fake metadata that follows the graph: recompute the values of changed nodes, and downstream of them.

The method is that of Inductor's ``FakeTensorUpdater``: only nodes whose call changed are recomputed, and
their users only as far as values actually change. No guard is added on symbolic sizes: a rewrite must not
narrow what the graph may be called with.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fake.seam.dispatch import OpOverload
from fake.seam.fake_tensor import FakeTensor
from fxpasses.graphs.aliasing import is_alias
from fxpasses.graphs.rewriting import (
    attribute_of,
    compute_value,
    fake_mode_of,
    same_metadata,
    same_size,
    value_of,
)
from fxpasses.pass_manager.runs import Snapshot, same_argument


@dataclass(frozen=True)
class Difference:
    """A node whose recorded value did not match the result of its call.

    Attributes:
        node: the node.
        recorded: its value so far.
        computed: its value now.
        problem: a description of what differs.
        follows: whether an input of the node changed too, so that the recorded value may have been right
            before.
    """

    node: fx.Node
    recorded: Any
    computed: Any
    problem: str
    follows: bool


def refresh(
    gm: fx.GraphModule, changed: Collection[fx.Node], before: Snapshot | None = None
) -> list[Difference]:
    """Recompute the fake values of changed nodes, and downstream of them as far as values change.

    Skips nodes whose inputs have no values, calls of anything other than operators, operators with
    data-dependent results, and graphs without fake values.

    Args:
        gm: the graph.
        changed: the nodes to start from.
        before: the graph before the change. A node whose new arguments have the same metadata as before is
            not recomputed, unless it is a view.

    Returns:
        The values that differ from the recorded ones, in graph order.
    """
    mode = fake_mode_of(gm.graph)
    if mode is None or not changed:
        return []
    pending = set(changed)
    differences: dict[fx.Node, Difference] = {}
    for node in gm.graph.nodes:
        if node not in pending or node.op == "output":
            continue
        if node.op == "get_attr" and "val" not in node.meta:
            _set_attribute_value(gm, node, mode)
        elif before is not None and _arguments_match(node, before):
            continue
        elif node.op == "call_function" and _is_computable(node):
            recorded = value_of(node)
            computed = compute_value(node, mode)
            if recorded is None:
                node.meta["val"] = computed
            elif (problem := metadata_difference(recorded, computed)) is not None:
                follows = any(n in differences for n in node.all_input_nodes)
                differences[node] = Difference(node, recorded, computed, problem, follows)
                node.meta["val"] = computed
            elif is_alias(node):
                node.meta["val"] = computed  # same metadata, in its new base's memory
            else:
                continue
            pending.update(node.users)
    return list(differences.values())


def metadata_difference(a: Any, b: Any, strides: bool = True) -> str | None:
    """Compare two fake values: shape, dtype, device, layout, and strides where they matter.

    Args:
        a: a tensor, a number, or a list of these.
        b: the value that replaced it.
        strides: whether strides count.

    Returns:
        A description of the difference, or ``None``.

    >>> metadata_difference(torch.ones(2), torch.ones(2, dtype=torch.float64))
    'dtype torch.float32 became torch.float64'
    """
    if a is b:
        return None
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _tensor_difference(a, b, strides)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        found = (metadata_difference(x, y, strides) for x, y in zip(a, b, strict=True))
        return next((problem for problem in found if problem is not None), None)
    if _is_integer(a) and _is_integer(b):
        return None if _equal_sizes(a, b) else f"value {a} became {b}"
    if type(a) is not type(b):
        return f"{type(a).__name__} became {type(b).__name__}"
    return None


def _tensor_difference(a: torch.Tensor, b: torch.Tensor, strides: bool) -> str | None:
    for name in ("dtype", "device", "layout"):
        if (was := getattr(a, name)) != (now := getattr(b, name)):
            return f"{name} {was} became {now}"
    if a.dim() != b.dim() or not all(_equal_sizes(x, y) for x, y in zip(a.shape, b.shape, strict=True)):
        return f"shape {tuple(a.shape)} became {tuple(b.shape)}"
    if a.is_conj() != b.is_conj() or a.is_neg() != b.is_neg():
        return "the lazy conjugation or negation differs"
    if not strides or a.layout is not torch.strided or any(isinstance(s, int) and s == 0 for s in a.shape):
        return None
    for size, was, now in zip(a.shape, a.stride(), b.stride(), strict=True):
        if not (isinstance(size, int) and size == 1) and not _equal_sizes(was, now):
            return f"stride {a.stride()} became {b.stride()}"
    return None


def _equal_sizes(a: Any, b: Any) -> bool:
    """Whether two sizes are equal as far as known. Never adds a guard, never calls equal sizes different."""
    if same_size(a, b):
        return True
    if isinstance(a, int) and isinstance(b, int):
        return False
    if statically_known_true(a == b):
        return True
    if statically_known_true(a != b):
        return False
    hints = [s if isinstance(s, int) else s.node.hint if s.node.has_hint() else None for s in (a, b)]
    return None in hints or hints[0] == hints[1]


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _arguments_match(node: fx.Node, before: Snapshot) -> bool:
    """Whether only arguments changed, to ones of equal metadata, so that the result's metadata is equal."""
    old = before.by_node.get(node)
    if old is None or old.target != node.target or old.value is not value_of(node) or is_alias(node):
        return False

    def alike(a: Any, b: Any) -> bool:
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            was, now = before.by_node[a].value, value_of(b)
            return was is now or same_metadata(was, now)
        return same_argument(a, b, alike)

    return value_of(node) is not None and alike(old.args, node.args) and alike(old.kwargs, node.kwargs)


def _is_computable(node: fx.Node) -> bool:
    target = node.target
    if any(value_of(n) is None for n in node.all_input_nodes):
        return False
    if not isinstance(target, OpOverload):
        pure = getattr(target, "__module__", None) in ("_operator", "math", "torch.sym")
        return pure or (value_of(node) is None and callable(target))
    tags = target.tags
    if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
        return value_of(node) is None
    return True


def _set_attribute_value(gm: fx.GraphModule, node: fx.Node, mode: Any) -> None:
    value = attribute_of(node, gm)
    if isinstance(value, torch.Tensor):
        is_fake = isinstance(value, FakeTensor)
        node.meta["val"] = value if is_fake else mode.from_tensor(value, static_shapes=True)
