"""Values for the inputs of windows, wherever in a graph they are, that show what few inputs of the graph do.

The very numbers that a graph compares with: there a rewrite shows ``<`` that was ``<=``, which no random input does. And numbers next to each
other, or far from one, of which a rewrite may lose the digits.

What a pass changed is looked at in its windows. What is compared there (with a number, with another value, or by an operator
that is made of pieces) is met exactly, in float64, by moving one input of the window. Where elements are chosen, inputs of few different numbers are tried.
An input of a window that the graph computes becomes an input of both graphs, if it may be any number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.checking.inputs import Unsupported, cloned
from fxpasses.checking.interpret import CANNOT_RUN, ExactRun, Run, as_float64, as_recorded_dtype
from fxpasses.checking.rounding import less_precise, same_bits
from fxpasses.checking.same_function import JUMP, Difference, Rewriting, differences_in_float64
from fxpasses.checking.windows import Change, Window, cut
from fxpasses.exact.samples import sample_input
from fxpasses.graphs.rewriting import copy_graph, value_of

aten, prims = torch.ops.aten, torch.ops.prims

_MOST_COMPARISONS = 12
_STEPS = 6
_STEP = 2.0**-6
"""The slope of what is compared is measured over this distance: less than what rounds to a whole number repeats after."""
_FINE = 2.0**10
"""What is met only nearly is tried with so many steps to one: the numbers of programs are short."""
_NEAR = 1e-9
"""A value that is so near to what it is compared with may be on either side, as float64 rounds."""
_LARGE, _CLOSE = 16.0, 2.0**-8
"""What activations are far from their middle on, and the distance of numbers of which a difference loses half of its digits."""
_MOST_CALLS = 6
"""Calls between an input of a window and one that may be any number."""
Rule = Callable[[Tensor, Sequence[Any]], list[Any]]


@dataclass(frozen=True)
class Found:
    """Two graphs, and inputs on which they differ.

    Attributes:
        before: the graph before, perhaps with another input, the last.
        after: the graph after, likewise.
        inputs: of both.
        differences: other values that show there; none where digits are lost.
        where: what the inputs are, in words.
    """

    before: fx.GraphModule
    after: fx.GraphModule
    inputs: list[Any]
    differences: list[Difference]
    where: str


def _compared_with(*numbers: float) -> Rule:
    return lambda *_: list(numbers)


def _arguments(*positions: int) -> Rule:
    return lambda _, args: [args[at] for at in positions if len(args) > at and args[at] is not None]


_RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge), _arguments(1)),
    **dict.fromkeys((aten.clamp_min, aten.clamp_max, aten.maximum, aten.minimum), _arguments(1)),
    **dict.fromkeys((aten.fmax, aten.fmin, prims.fmax, prims.fmin, aten.threshold), _arguments(1)),
    **dict.fromkeys((aten.clamp, aten.hardtanh), _arguments(1, 2)),
    **dict.fromkeys((aten.relu, aten.abs, aten.sign, aten.sgn, aten.leaky_relu), _compared_with(0.0)),
    **dict.fromkeys((aten.elu, aten.heaviside, aten.prelu, aten.logical_not), _compared_with(0.0)),
    **dict.fromkeys((aten.hardswish, aten.hardsigmoid), _compared_with(-3.0, 3.0)),
    aten.round: lambda value, _: [value.floor() + 0.5],
    **dict.fromkeys((aten.floor, aten.ceil, aten.trunc), lambda value, _: [value.round()]),
    **dict.fromkeys((aten.remainder, aten.fmod), lambda value, args: [(value / args[1]).round() * args[1]]),
}
"""What the first argument of an operator is compared with: numbers, or values of its shape."""
_CHOOSING = {
    *(aten.maximum, aten.minimum, aten.amax, aten.amin, aten.max, aten.min, aten.argmax, aten.argmin),
    *(aten.sort, aten.topk, aten.median, aten.kthvalue, aten.mode, aten.cummax, aten.cummin),
    *(aten.max_pool2d_with_indices, aten.max_pool3d_with_indices, aten.adaptive_max_pool2d),
    prims._low_memory_max_pool_with_offsets,
}
_PRODUCTS = {
    *(aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution, aten.linear, aten.embedding),
    *(aten._scaled_dot_product_flash_attention_for_cpu, aten._to_copy),
}
_KEEPING = {
    *(aten.view, aten.reshape, aten.permute, aten.transpose, aten.t, aten.unsqueeze, aten.squeeze),
    *(aten.clone, aten.alias, aten.detach, aten.slice, aten.select, aten.neg, aten.mul, aten.div),
    *(aten._to_copy, prims.convert_element_type, aten._unsafe_view),
}
"""Operators that give any numbers when their first argument is any, and the others are numbers."""


def at_telling_values(rewriting: Rewriting) -> Iterator[Found]:
    """The differences of two graphs where what a changed call compares is equal, or where its results are small beside what they are made of.

    Args:
        rewriting: the graphs, and inputs on which they are the same.
    """
    seen: set[Hashable] = set()
    for narrow in rewriting.windows or ():
        if narrow.kind is not None and narrow.kind in seen:
            continue
        seen.add(narrow.kind)
        rounds, compares = _rounds_otherwise(narrow), _compares(narrow)
        if not rounds and not compares:
            continue
        window = _up_to_free_inputs(rewriting, narrow)
        given = {name: as_float64(value) for name, value in zip(_names(window), window.inputs, strict=True)}
        # Right, if it is, for values only that are related, where the window alone is another function.
        free = _free_inputs(rewriting, given, only_given=rewriting.relation(narrow) == "other")
        for values in _compared_values(window, given, free) if compares else ():
            inputs = list({**given, **values}.values())
            if differences_in_float64(window.before, window.after, inputs, JUMP):
                found = _on_the_whole(
                    rewriting, window, values, "at numbers that the graph compares with, or ties"
                )
                if found.differences:
                    yield found
        for values, where in _losing_values(given, free) if rounds else ():
            wide = {**given, **values}.values()
            inputs = [as_recorded_dtype(v, held) for v, held in zip(wide, window.inputs, strict=True)]
            if any(
                how.times < math.inf for how in less_precise(window.before, window.after, inputs).values()
            ):
                found = _on_the_whole(rewriting, window, values, where)
                if (
                    not found.differences
                ):  # it is the same function, of values that nothing relates any more, too
                    yield found


def _compares(window: Window) -> bool:
    nodes = [node for gm in (window.before, window.after) for node in gm.graph.nodes]
    held = [value.dtype for value in window.inputs if isinstance(value, Tensor)]
    return torch.bool in held or any(_rule(n) is not None or _packet(n) in _CHOOSING for n in nodes)


def _rounds_otherwise(window: Window) -> bool:
    """Whether both sides compute in float32 or more, and round otherwise."""
    held = [v.dtype for v in map(value_of, window.before.graph.nodes) if isinstance(v, Tensor)]
    if any(dtype.is_floating_point and torch.finfo(dtype).bits < 32 for dtype in held):
        return False
    try:
        mine, theirs = (Run(gm)(cloned(window.inputs), 0) for gm in (window.before, window.after))
    except (Unsupported, *CANNOT_RUN):
        return False
    pairs = zip(mine, theirs, strict=True)
    return any(isinstance(a, Tensor) and a.shape == b.shape and not same_bits(a, b) for a, b in pairs)


def _losing_values(given: Mapping[str, Any], free: Sequence[str]) -> Iterator[tuple[dict[str, Tensor], str]]:
    """Values of the free inputs, all in another way, and what they are."""
    if not free:
        return
    usual = {name: given[name].nan_to_num(0.0, 0.0, 0.0) for name in free}
    usual = {name: value / value.square().mean().sqrt().clamp(min=1e-30) for name, value in usual.items()}
    yield {name: _LARGE * value for name, value in usual.items()}, f"with a root mean square of {_LARGE:g}"
    yield {name: 1 + _CLOSE * value for name, value in usual.items()}, "near one"


def _up_to_free_inputs(rewriting: Rewriting, window: Window) -> Window:
    """A window that begins at inputs that may be any number, whatever the others are, as far as these are near."""
    nodes = {node.name: node for node in rewriting.before.graph.nodes}
    others = {node.name for node in rewriting.after.graph.nodes}
    for _ in range(_MOST_CALLS):
        taken = {nodes[name] for name in _names(window)}
        more = {
            node.name
            for node in taken
            if node.name in others
            and torch.Tag.pointwise in getattr(node.target, "tags", ())
            and not (_is_free(node) and all(_is_apart(node, other) for other in taken))
        }
        change = window.change
        wider = Change(change.before | more, change.after | more, change.given)
        found = cut(rewriting.before, rewriting.after, wider, rewriting.values) if more else None
        if found is None:
            break
        window = found
    return window


def _names(window: Window) -> list[str]:
    return [node.name for node in window.before.graph.find_nodes(op="placeholder")]


def _compared_values(
    window: Window, given: Mapping[str, Any], free: Sequence[str]
) -> Iterator[dict[str, Tensor]]:
    """Values of free inputs of a window, by name, at which what it compares is equal."""
    calls = [node for gm in (window.before, window.after) for node in gm.graph.nodes]
    compared = [node for node in calls if _rule(node) is not None][:_MOST_COMPARISONS]
    is_chosen = any(_packet(n) in _CHOOSING or (_rule(n) and len(n.all_input_nodes) > 1) for n in calls)
    if not compared and not is_chosen:
        return
    gaps = _Gaps(compared, given)
    for name in free:
        met = [m for node in compared for m in gaps.met(node, name)]
        if met:
            yield {name: gaps.without_near(name, _in_turn(given[name], met))}
        if len(met) > 1:  # a branch that is taken between two numbers only
            ordered = torch.stack(met).sort(0).values
            yield {
                name: gaps.without_near(name, _in_turn(given[name], list((ordered[1:] + ordered[:-1]) / 2)))
            }
    if is_chosen and free:
        generator = torch.Generator().manual_seed(len(given))
        yield {
            name: sample_input(given[name].cpu(), "ties", generator).to(given[name].device) for name in free
        }


def _free_inputs(rewriting: Rewriting, given: Mapping[str, Any], only_given: bool) -> list[str]:
    """The inputs of a window that may be any floats, whatever the others are."""
    nodes = {node.name: node for node in rewriting.before.graph.nodes}
    others = {node.name for node in rewriting.after.graph.nodes}
    taken = {nodes[name] for name in given}
    return [
        name
        for name, value in given.items()
        if isinstance(value, Tensor)
        and value.is_floating_point()
        and value.numel()
        and name in others
        and (
            nodes[name].op == "placeholder"
            or (
                not only_given
                and _is_free(nodes[name])
                and all(_is_apart(nodes[name], other) for other in taken)
            )
        )
    ]


def _is_apart(node: fx.Node, other: fx.Node) -> bool:
    """Whether a value can be any while another one stays as it is, unless that is computed from it."""
    if node is other:
        return True
    mine, theirs = _origin(node), _origin(other)
    own = {value for value in mine - theirs if value.op == "placeholder" and value is not other}
    return other not in mine and (node in theirs or bool(own))


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def _rule(node: fx.Node) -> Rule | None:
    value = value_of(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    return _RULES.get(_packet(node)) if isinstance(value, Tensor) and value.is_floating_point() else None


def _is_free(node: fx.Node, calls: int = 32) -> bool:
    """Whether inputs of the graph can give this value any elements; by so many calls at most."""
    packet = _packet(node)
    if node.op == "placeholder" or packet in _PRODUCTS:
        value = value_of(node)
        return isinstance(value, Tensor) and value.is_floating_point()
    if packet in (aten.add, aten.sub):
        operands = [value for value in node.args[1::-1] if isinstance(value, fx.Node)]
        return calls > 0 and any(_is_free(value, calls - 1) for value in operands)
    (given, *others) = node.all_input_nodes or [node]
    return calls > 0 and packet in _KEEPING and not others and _is_free(given, calls - 1)


def _origin(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    queue = list(node.all_input_nodes)
    while queue:
        value = queue.pop()
        if value not in found:
            found.add(value)
            queue += value.all_input_nodes
    return found


class _Gaps:
    """How far what calls compare is from being equal.

    Args:
        compared: the calls.
        given: float64 values of the inputs of their graphs, by name.
    """

    def __init__(self, compared: Sequence[fx.Node], given: Mapping[str, Any]) -> None:
        self._compared, self._given = compared, given
        self._needed = {node: {n.name for n in _origin(node)} for node in compared}

    def _of(self, node: fx.Node, name: str, value: Tensor) -> list[Tensor]:
        """Those of one call, for a value of an input that it depends on element by element."""
        given = {**self._given, name: value}
        run, rule = ExactRun(node.graph.owning_module), _rule(node)  # type: ignore[arg-type]
        assert rule is not None
        try:
            found = {**given, **run.part(self._needed[node], given)}
            taken: Any = fx.node.map_arg(node.args, lambda n: found[n.name])
            gaps = [taken[0] - number for number in rule(taken[0], taken)]
        except CANNOT_RUN:
            return []
        return [gap.reshape(value.shape) for gap in gaps if gap.numel() == value.numel()]

    def met(self, node: fx.Node, name: str) -> list[Tensor]:
        """Values of an input at which elements that a call compares are equal."""
        if name not in self._needed[node]:
            return []
        start = self._given[name]

        def gap(number: int, value: Tensor) -> Tensor:
            return self._of(node, name, value)[number]

        found = [_solved(start, partial(gap, n)) for n in range(len(self._of(node, name, start)))]
        return [value for value in found if value is not None]

    def without_near(self, name: str, value: Tensor) -> Tensor:
        """A value of an input without the elements that make something nearly equal."""
        start = self._given[name]
        near = torch.zeros_like(value, dtype=torch.bool)
        for node in self._compared:
            if name in self._needed[node]:
                for gap in self._of(node, name, value):
                    near |= (gap != 0) & (gap.abs() < _NEAR * value.abs().clamp(min=1.0))
        return torch.where(near, start, value)


def _in_turn(value: Tensor, others: Sequence[Tensor]) -> Tensor:
    """The elements of each of several tensors in turn."""
    flat = value.flatten()
    turn = torch.arange(flat.numel(), device=flat.device) % (len(others) + 1)
    for number, other in enumerate(others):
        flat = torch.where(turn == number, other.flatten(), flat)
    return flat.view(value.shape)


def _solved(start: Tensor, gap: Callable[[Tensor], Tensor]) -> Tensor | None:
    """The input with each element moved to where its gap is zero, where that is found; ``None`` where it is nowhere."""
    value, best = start, start
    is_met = gap(start) == 0
    for _ in range(_STEPS):
        now = gap(value)
        slope = (gap(value + _STEP) - now) / _STEP
        value = torch.where((slope != 0) & slope.isfinite(), value - now / slope, value)
        for candidate in (value, (value * _FINE).round() / _FINE):
            hits = ~is_met & (gap(candidate) == 0)
            best, is_met = torch.where(hits, candidate, best), is_met | hits
        if bool(is_met.all()):
            break
    return best if bool(is_met.any()) else None


def _on_the_whole(rewriting: Rewriting, window: Window, values: Mapping[str, Tensor], where: str) -> Found:
    """What both graphs give where inputs of a window have these values."""
    nodes = rewriting.before.graph.find_nodes(op="placeholder")
    inputs = [values.get(n.name, value) for n, value in zip(nodes, rewriting.inputs, strict=True)]
    inside = [name for name in values if name not in {n.name for n in nodes}]
    before, after = (_from(gm, inside) for gm in (rewriting.before, rewriting.after))
    inputs += [values[name] for name in inside]
    found = differences_in_float64(before, after, inputs, JUMP) or []
    examples = map(value_of, before.graph.find_nodes(op="placeholder"))
    inputs = [as_recorded_dtype(v, example) for v, example in zip(inputs, examples, strict=True)]
    calls = window.change.names
    names = "inputs" if not inside else f"{', '.join(inside)}, taken for inputs,"
    differences = [Difference(d.position, d.problem, calls) for d in found]
    return Found(before, after, inputs, differences, f"{names} {where}")


def _from(gm: fx.GraphModule, names: Collection[str]) -> fx.GraphModule:
    """The graph with some of its values taken as further inputs."""
    if not names:
        return gm
    copy = copy_graph(gm)
    nodes = {node.name: node for node in copy.graph.nodes}
    *_, last = copy.graph.find_nodes(op="placeholder")
    for name in names:
        with copy.graph.inserting_after(last):
            last = copy.graph.placeholder(f"{name}_given")
        last.meta = {"val": value_of(nodes[name]), "is_cut": True}
        nodes[name].replace_all_uses_with(last)
    copy.recompile()
    return copy
