"""Single changes of a graph: operator, constant, dimension, index, order or operand; metadata stays."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.graphs.rewriting import compute_value, copy_graph, fake_mode_of, same_metadata, value_of

__all__ = ["Mutation", "mutations"]

aten, prims = torch.ops.aten, torch.ops.prims

_ALIKE = [
    "add.Tensor sub.Tensor",
    "mul.Tensor div.Tensor",
    "add.Tensor mul.Tensor",
    "maximum.default minimum.default add.Tensor",
    "exp.default expm1.default exp2.default",
    "log.default log1p.default log2.default",
    "sin.default cos.default",
    "sqrt.default rsqrt.default",
    "rsqrt.default reciprocal.default",
    "tanh.default sigmoid.default erf.default",
    "abs.default neg.default relu.default",
    "floor.default ceil.default round.default trunc.default",
    "amax.default amin.default",
    "sum.dim_IntList mean.dim",
    "argmax.default argmin.default",
    "any.dim all.dim",
    "lt.Tensor le.Tensor",
    "gt.Tensor ge.Tensor",
    "lt.Scalar le.Scalar",
    "gt.Scalar ge.Scalar",
    "gt.Tensor lt.Tensor",
    "eq.Tensor ne.Tensor",
    "eq.Scalar ne.Scalar",
    "logical_and.default logical_or.default",
    "bitwise_and.Tensor bitwise_or.Tensor",
    "logical_not.default bitwise_not.default",
]
"""Operators that take the same arguments."""

_DIMENSIONS = ("dim", "dims", "dim0", "dim1", "axis", "dimension")
_COMMUTE = (
    *("add.Tensor", "mul.Tensor", "maximum.default", "minimum.default", "eq.Tensor", "ne.Tensor"),
    *("logical_and.default", "logical_or.default", "bitwise_and.Tensor", "bitwise_or.Tensor"),
)


@dataclass(frozen=True)
class Mutation:
    """One change to one call.

    Attributes:
        kind: what is changed.
        node: the name of the call.
        told: the change in words.
        apply: makes the change on a copy of the call.
    """

    kind: str
    node: str
    told: str
    apply: Callable[[fx.Node], None]

    def made(self, gm: fx.GraphModule) -> fx.GraphModule | None:
        """Return a changed copy of the graph; ``None`` if values change size or type, or nothing changes."""
        copy = copy_graph(gm, constants=True)
        node = next(n for n in copy.graph.nodes if n.name == self.node)
        was = value_of(node)
        told = f"{node.target} {node.args} {node.kwargs}"
        self.apply(node)
        if f"{node.target} {node.args} {node.kwargs}" == told and node.users:
            return None
        if node.op == "call_function":
            try:
                now = compute_value(node, fake_mode_of(copy.graph))
            except Exception:  # noqa: BLE001  (whatever a call with other arguments raises: it is no change to look at)
                return None
            if not _is_alike(was, now):
                return None
            node.meta["val"] = now
        copy.graph.eliminate_dead_code()
        copy.graph.lint()
        copy.recompile()
        return copy


def _is_alike(was: Any, now: Any) -> bool:
    if isinstance(was, (list, tuple)):
        return isinstance(now, (list, tuple)) and len(was) == len(now) and all(map(_is_alike, was, now))
    if not isinstance(was, Tensor):
        return type(was) is type(now)
    return isinstance(now, Tensor) and same_metadata(was, now)


def mutations(gm: fx.GraphModule) -> Iterator[Mutation]:
    """Yield the single changes of a graph, call by call, including those that :meth:`Mutation.made` drops."""
    earlier: list[fx.Node] = []
    for node in gm.graph.nodes:
        if node.op == "call_function" and (
            isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
        ):
            yield from _of_call(node, earlier)
        if isinstance(value_of(node), Tensor):
            earlier.append(node)
    yield from _of_results(gm)


def _of_call(node: fx.Node, earlier: list[fx.Node]) -> Iterator[Mutation]:
    if node.target is operator.getitem:
        for other in {0, 1, 2} - {node.args[1]}:
            yield Mutation("index", node.name, f"getitem {node.args[1]} became {other}", _argument(1, other))
        return
    yield from _operators(node)
    yield from _dropped(node)
    target: Any = node.target
    for at, value in enumerate(node.args):
        yield from _arguments(node, at, target._schema.arguments[at].name, value)
    for name, value in node.kwargs.items():
        yield from _arguments(node, name, name, value)
    yield from _orders(node)
    yield from _operands(node, earlier)
    value = value_of(node)
    if isinstance(value, Tensor) and value.dtype is torch.float32:
        yield Mutation("type", node.name, "its result rounded to bfloat16", _rounded)


def _operators(node: fx.Node) -> Iterator[Mutation]:
    told = str(node.target).removeprefix("aten.")
    for group in _ALIKE:
        listed = group.split()
        for other in listed if told in listed else ():
            packet, _, overload = other.partition(".")
            target = getattr(getattr(aten, packet), overload)
            if target is not node.target:
                yield Mutation("operator", node.name, f"{told} became {other}", _target(target))


def _target(target: Any) -> Callable[[fx.Node], None]:
    def apply(node: fx.Node) -> None:
        node.target = target
        node.kwargs = {
            k: v for k, v in node.kwargs.items() if k in [a.name for a in target._schema.arguments]
        }

    return apply


def _dropped(node: fx.Node) -> Iterator[Mutation]:
    for given in dict.fromkeys(node.all_input_nodes):
        if not _is_alike(value_of(node), value_of(given)) or node.target in (
            aten.clone.default,
            aten.alias.default,
        ):
            continue

        def apply(copy: fx.Node, name: str = given.name) -> None:
            source = next(n for n in copy.all_input_nodes if n.name == name)
            copy.replace_all_uses_with(source)

        yield Mutation("call left out", node.name, f"{node.target} became its operand {given}", apply)


def _arguments(node: fx.Node, at: int | str, name: str, value: Any) -> Iterator[Mutation]:
    if isinstance(value, bool):
        yield Mutation("constant", node.name, f"{name}={value} became {not value}", _argument(at, not value))
    elif isinstance(value, float):
        for other in dict.fromkeys((-value, value * 1.001, value * 2, value + 1.0)):
            if other != value:
                yield Mutation("constant", node.name, f"{name}={value} became {other}", _argument(at, other))
    elif isinstance(value, int):
        kind = "dimension" if name in _DIMENSIONS else "index"
        for other in (value - 1, value + 1, -value):
            if other != value:
                yield Mutation(kind, node.name, f"{name}={value} became {other}", _argument(at, other))
        if name == "start" and len(node.args) > 3 and isinstance(node.args[3], int):
            for step in (-1, 1):
                end = node.args[3] + step
                if value + step >= 0 and value >= 0:
                    yield Mutation(
                        "index",
                        node.name,
                        f"{value}:{node.args[3]} became {value + step}:{end}",
                        _slice(value + step, end),
                    )
    elif isinstance(value, (list, tuple)) and value and all(type(v) is int for v in value):
        kind = "dimension" if name in _DIMENSIONS else "index"
        for i, one in enumerate(value):
            for other in (one - 1, one + 1):
                changed = [other if j == i else v for j, v in enumerate(value)]
                yield Mutation(
                    kind, node.name, f"{name}={list(value)} became {changed}", _argument(at, changed)
                )
            for j in range(i):
                changed = list(value)
                changed[i], changed[j] = changed[j], changed[i]
                yield Mutation(
                    kind, node.name, f"{name}={list(value)} became {changed}", _argument(at, changed)
                )
    elif isinstance(value, (list, tuple)) and value and all(isinstance(v, fx.Node) for v in value):
        for i in range(1, len(value)):
            changed = list(value)
            changed[i], changed[i - 1] = changed[i - 1], changed[i]
            yield Mutation(
                "order",
                node.name,
                f"{name}: {changed[i]} and {changed[i - 1]} swapped",
                _swapped_items(at, i),
            )


def _argument(at: int | str, value: Any) -> Callable[[fx.Node], None]:
    def apply(node: fx.Node) -> None:
        if isinstance(at, int):
            node.update_arg(at, value)
        else:
            node.update_kwarg(at, value)

    return apply


def _slice(start: int, end: int) -> Callable[[fx.Node], None]:
    def apply(node: fx.Node) -> None:
        node.update_arg(2, start)
        node.update_arg(3, end)

    return apply


def _swapped_items(at: int | str, i: int) -> Callable[[fx.Node], None]:
    def apply(node: fx.Node) -> None:
        held: Any = node.args[at] if isinstance(at, int) else node.kwargs[at]
        listed = list(held)
        listed[i], listed[i - 1] = listed[i - 1], listed[i]
        _argument(at, listed)(node)

    return apply


def _orders(node: fx.Node) -> Iterator[Mutation]:
    if str(node.target).removeprefix("aten.") in _COMMUTE:
        return
    tensors = [
        i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and isinstance(value_of(a), Tensor)
    ]
    for i, j in itertools.pairwise(tensors):
        if node.args[i] is not node.args[j]:

            def apply(copy: fx.Node, i: int = i, j: int = j) -> None:
                args = list(copy.args)
                args[i], args[j] = args[j], args[i]
                copy.args = tuple(args)

            yield Mutation("order", node.name, f"{node.args[i]} and {node.args[j]} swapped", apply)


def _operands(node: fx.Node, earlier: list[fx.Node]) -> Iterator[Mutation]:
    for at, given in enumerate(node.args):
        if not isinstance(given, fx.Node) or not isinstance(value_of(given), Tensor):
            continue
        others = [n for n in earlier[-40:] if n is not given and _is_alike(value_of(given), value_of(n))]
        for other in others[-1:]:

            def apply(copy: fx.Node, at: int = at, name: str = other.name) -> None:
                copy.update_arg(at, next(n for n in copy.graph.nodes if n.name == name))

            yield Mutation("operand", node.name, f"{given} became {other}", apply)


def _rounded(node: fx.Node) -> None:
    users = list(node.users)
    with node.graph.inserting_after(node):
        narrow = node.graph.call_function(prims.convert_element_type.default, (node, torch.bfloat16))
    with node.graph.inserting_after(narrow):
        wide = node.graph.call_function(prims.convert_element_type.default, (narrow, torch.float32))
    mode = fake_mode_of(node.graph)
    for new in (narrow, wide):
        new.meta["val"] = compute_value(new, mode)
    for user in users:
        user.replace_input_with(node, wide)


def _of_results(gm: fx.GraphModule) -> Iterator[Mutation]:
    (output,) = gm.graph.find_nodes(op="output")
    listed = output.args[0] if isinstance(output.args[0], (list, tuple)) else [output.args[0]]
    for i, j in zip(range(len(listed)), range(1, len(listed)), strict=False):
        a, b = listed[i], listed[j]
        if (
            isinstance(a, fx.Node)
            and isinstance(b, fx.Node)
            and a is not b
            and _is_alike(value_of(a), value_of(b))
        ):
            yield Mutation("order", output.name, f"results {i} and {j} swapped", _swapped_items(0, j))
