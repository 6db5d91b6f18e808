"""Values that expose what few inputs of a graph do, wherever in the graph a pass changed something.

Changes are examined in their windows. Window inputs get the numbers in its calls and constants, their sums
and products, and numbers between two of them: there ``<`` takes the other side of ``<=``. Exact arithmetic,
where ``3 * 0.1`` is ``0.3``, then decides whether a window is another function. If it rounds otherwise,
numbers of which it may lose digits are tried. The finding must show in the whole graph: a computed input of a
window becomes an input of both graphs, if it may be any number.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.checking.comparison.computed_constants import constant_float_values
from fxpasses.checking.comparison.nan_guards import had_guards
from fxpasses.checking.comparison.rounding import less_precise, same_bits, spacing
from fxpasses.checking.comparison.same_function import JUMP, Difference, Rewriting, differences_in_float64
from fxpasses.checking.comparison.windows import Change, Window, cut
from fxpasses.checking.critical.both_sides import BothSides
from fxpasses.checking.critical.compared_numbers import (
    MAX_NUMBER,
    MAX_TURNS,
    inputs_at_comparisons,
    interleave,
    is_broadcastable,
    is_piecewise,
    numbers_in_calls,
    window_calls,
)
from fxpasses.checking.critical.crossings import crossed_values, small_inputs
from fxpasses.checking.critical.free_values import (
    PASS_THROUGH_OPS,
    DependentValues,
    ancestors,
    copied_value,
    is_free,
    is_independent,
    nearest_free_values,
    packet,
)
from fxpasses.checking.critical.given_values import (
    Counterexample,
    free_inputs,
    input_names,
    is_float64_tensor,
    with_values_as_inputs,
)
from fxpasses.checking.critical.losing_values import followed_values, losing_values, narrowed_values
from fxpasses.checking.critical.overflow import has_narrow_dtype, overflows
from fxpasses.checking.critical.tied_values import tied_values
from fxpasses.checking.execution.inputs import Unsupported, cloned
from fxpasses.checking.execution.interpret import RUN_ERRORS, ExactRun, Run, as_float64, as_recorded_dtype
from fxpasses.exact.samples import sample_input
from fxpasses.graphs.numbers import computable

aten, prims = torch.ops.aten, torch.ops.prims

_MAX_ELEMENTS, _MIN_NUMBERS = 1 << 22, 8
"""Total elements to try for one input, but at least this many numbers."""
_MAX_CALLS_MADE, _MIN_TRIES = 20_000, 64
"""Total calls of a window to make, but at least this many values."""
_MAX_CALLS = 12
"""Calls between an input of a window and one that may be any number."""
_MAX_ULPS = 64
"""Units in the last place by which computing a constant in another way may move it."""
INTEGERS = (torch.int32, torch.int64)

_FOLLOWED_TAGS = {torch.Tag.pointwise, torch.Tag.reduction}
_MOVING_OPS = {
    aten.index,
    aten._unsafe_index,
    aten._unsafe_masked_index,
    aten.constant_pad_nd,
    aten.cat,
    prims.rev,
}
"""Operators that move elements: interpolation and windows consist of them."""


def at_critical_values(
    rewriting: Rewriting, has_time: Callable[[], bool] = lambda: True
) -> Iterator[Counterexample]:
    """Yield differences where changed calls compare equal values, and inputs that may lose precision.

    Args:
        rewriting: the graphs, and inputs on which they are the same.
        has_time: whether to try more values.
    """
    seen: set[Hashable] = set()
    windows = list(rewriting.windows or ())
    mine, theirs = map(frozenset, rewriting.changed)
    whole = Window(Change(mine, theirs, ()), rewriting.before, rewriting.after, list(rewriting.inputs))
    if rewriting.joined is not None:
        suspects = set(map(id, rewriting.suspects))
        windows = [*(window for window in windows if id(window) not in suspects), rewriting.joined]
    elif not windows or rewriting.suspects:  # only the whole graph can tell
        windows.append(whole)
    for narrow in itertools.takewhile(lambda _: has_time(), windows):
        if narrow.kind is not None and narrow.kind in seen:
            continue
        seen.add(narrow.kind)
        if not narrow.inputs:
            narrow = _with_users(rewriting, narrow)
        new, is_moved = ([], False) if narrow is whole else _changed_constants(narrow)
        rounds = _rounds_differently(narrow)
        chosen: tuple[list[fx.Node], list[fx.Node]] = (
            ([], []) if narrow is whole else _changed_choices(rewriting, narrow)
        )
        counts = [] if narrow is whole else _computed_integers(rewriting, narrow)
        has_choices = narrow is not whole and bool(any(chosen) or counts or is_moved)
        may_overflow = narrow is not whole and has_narrow_dtype(narrow)
        if (new and not is_moved) or not (rounds or has_choices or may_overflow):
            continue
        window = narrow if narrow is whole else extend_to_free_inputs(rewriting, narrow)
        given = {
            name: as_float64(value) for name, value in zip(input_names(window), window.inputs, strict=True)
        }
        # If the window alone is another function, the rewrite may rest on how its inputs are related.
        is_other = narrow is not whole and rewriting.relation(narrow) == "other"
        only_graph_inputs = is_other and rewriting.relation(window) == "other"
        free = free_inputs(rewriting, given, only_graph_inputs)
        deciding = free if is_moved else _inputs_of_choices(window, free, chosen, counts)
        compared = _compared_values(window, given, deciding, new) if has_choices else ()
        compared = itertools.chain(tied_values(window, given, free, chosen), compared)
        sides = BothSides(window)
        meeting = list(inputs_at_comparisons(window.before, list(given.values()))) if has_choices else []
        for values in itertools.takewhile(lambda _: has_time(), compared):
            for several in itertools.chain(
                [values], _combine_with_comparisons(rewriting, given, free, values, meeting)
            ):
                if sides.are_different(several):
                    yield from _show_in_graph(rewriting, window, several)
                    break
        for name, after, values in crossed_values(rewriting, narrow, *chosen) if has_choices else ():
            yield from _show_in_graph(rewriting, narrow, values, {name: after})
        for inputs in small_inputs(rewriting, *chosen):
            found = _compare_whole_graphs(
                rewriting.with_inputs(inputs), narrow, {}, "so small that a number decides"
            )
            if found.differences:
                yield found
        sides = BothSides(narrow)
        for values in _values_following_inputs(rewriting, narrow, is_other) if has_choices else ():
            if sides.are_different(values):
                yield from _show_in_graph(rewriting, narrow, values)
        if narrow is not whole:
            yield from overflows(rewriting, narrow, is_other)
        if is_other:
            continue
        lost = (losing_values,) * rounds + (narrowed_values,) * any(chosen)
        for values, where in itertools.chain.from_iterable(make(window, given, free) for make in lost):
            yield from _show_lost_precision(rewriting, window, values, where)
        for values, where in followed_values(rewriting, narrow) if rounds and narrow is not whole else ():
            yield from _show_lost_precision(rewriting, narrow, values, where)


def _combine_with_comparisons(
    rewriting: Rewriting,
    given: Mapping[str, Any],
    free: Sequence[str],
    values: Mapping[str, Any],
    meeting: Sequence[Sequence[Any]],
) -> Iterator[dict[str, Any]]:
    """Combine the values with those of other window inputs at which several comparisons meet."""
    inputs = {node.name for node in rewriting.before.graph.find_nodes(op="placeholder")}
    others = (given.keys() & {*free, *inputs}) - values.keys()
    for sides in meeting if others else ():
        yield {**{name: v for name, v in zip(given, sides, strict=True) if name in others}, **values}


def _show_in_graph(
    rewriting: Rewriting, window: Window, values: Mapping[str, Tensor], after: Mapping[str, str] | None = None
) -> Iterator[Counterexample]:
    where = "at numbers that the graph holds, or ties"
    meeting = inputs_at_comparisons(rewriting.before, rewriting.inputs)
    for inputs in itertools.chain([rewriting.inputs], meeting):
        found = _compare_whole_graphs(rewriting.with_inputs(inputs), window, values, where, after)
        if found.differences:
            yield found
            return


def _show_lost_precision(
    rewriting: Rewriting, window: Window, values: Mapping[str, Tensor], where: str
) -> Iterator[Counterexample]:
    """Yield both graphs with window inputs on which the window loses precision and is the same function.

    Nothing relates these inputs any more.
    """
    taken = zip(input_names(window), window.inputs, strict=True)
    inputs = [as_recorded_dtype(values.get(name, as_float64(held)), held) for name, held in taken]
    how = less_precise(window.before, window.after, inputs, chosen=True).values()
    if any(one.times < math.inf for one in how):
        found = _compare_whole_graphs(rewriting, window, values, where)
        if not found.differences:
            yield found


def _values_following_inputs(
    rewriting: Rewriting, window: Window, only_graph_inputs: bool
) -> Iterator[dict[str, Tensor]]:
    """Yield window inputs that follow a free one, with it, where one equals what the window compares with."""
    nodes = {node.name: node for node in rewriting.before.graph.nodes}
    others = {node.name for node in rewriting.after.graph.nodes}
    names = input_names(window)
    numbers = numbers_in_calls(window)
    numbers += [(a + b) / 2 for a, b in itertools.pairwise(sorted(numbers))]
    wanted = {name: numbers for name in names if nodes[name].op == "call_function" and name in others}
    inside = {
        name: near for name, near in _compared_intermediates(window, numbers).items() if name not in wanted
    }
    for name, numbers in (wanted | inside).items():
        value = as_float64(rewriting.values.get(name))
        if not is_float64_tensor(value):
            continue
        for source in nearest_free_values(nodes[name], only_graph_inputs or name in inside):
            dependents = DependentValues(rewriting.before, [source], [*names, name], rewriting.values)
            bounds = dependents.bounds(name) if source.name in others and dependents.is_independent else None
            goals = (
                []
                if bounds is None
                else _one_per_row(value, [n for n in numbers if bounds[0] <= n <= bounds[1]])
            )
            reached = [found for goal in goals if (found := dependents.solve(name, goal)) is not None]
            for found in reached:
                yield {other: given for other, given in found.items() if other != name or name in wanted}
            if reached:
                break


def _compared_intermediates(window: Window, numbers: Sequence[float]) -> dict[str, list[float]]:
    """Window values computed from many elements and compared with numbers (a norm), with nearby numbers."""
    found: dict[str, list[float]] = {}
    several: set[fx.Node] = set()
    for node in window.before.graph.nodes:
        is_own = node.op == "call_function" and torch.Tag.pointwise not in getattr(node.target, "tags", ())
        if is_own or any(given in several for given in node.all_input_nodes):
            several.add(node)
        if not is_piecewise(node):
            continue
        written = [float(n) for n in (*node.args, *node.kwargs.values()) if type(n) in (int, float)]
        for given in node.all_input_nodes if written else ():
            if given in several:
                found[given.name] = sorted(numbers, key=lambda n: min(abs(n - w) for w in written))
    return found


def _one_per_row(value: Tensor, numbers: Sequence[float]) -> Iterator[Tensor]:
    """Yield goals for the elements of a value: one number in each row, and NaN for all others."""
    columns = value.shape[-1] if value.dim() else 1
    rows = value.numel() // columns
    for turn in range(min(MAX_TURNS, -(-2 * len(numbers) // rows))):
        row = torch.arange(rows)
        goal = torch.full((rows, columns), math.nan, dtype=value.dtype)
        goal[row, (row + turn) % columns] = torch.tensor(
            [numbers[(int(i) + turn * rows) % len(numbers)] for i in row], dtype=value.dtype
        )
        yield goal.view(value.shape).to(value.device)


def _changed_choices(rewriting: Rewriting, window: Window) -> tuple[list[fx.Node], list[fx.Node]]:
    """The choices that only one side of a window makes.

    At ties of what they compare, the window may be another function, even if it is none on random values. If
    both sides make the same choices of the same values, it is none: what is computed before the first choice
    is analytic, and the same everywhere if it is so on random values. So is the first choice then, and what
    is computed before the second one, and so on.
    """
    mine, theirs = (list(filter(is_piecewise, gm.graph.nodes)) for gm in (window.before, window.after))
    equal = rewriting.equal_values(window) if mine or theirs else {}

    first = {node.name: node for node in window.before.graph.nodes}

    def copied(node: fx.Node) -> str:
        return copied_value(node).name

    def name(node: fx.Node) -> str:
        """The first side's name of a value of the second; "" if it has none."""
        return node.name if node.op == "placeholder" else equal.get(node.name, "")

    def copied_there(node: fx.Node) -> str:
        found = first.get(name(copied_value(node)))
        return copied(found) if found is not None else ""

    old = {(node.name, _describe_call(node, copied)): node for node in mine}
    new = {(name(node), _describe_call(node, copied_there)): node for node in theirs}
    return [old[key] for key in old if key not in new], [new[key] for key in new if key not in old]


def _inputs_of_choices(
    window: Window, free: Sequence[str], chosen: Sequence[Sequence[fx.Node]], counts: Sequence[str]
) -> list[str]:
    """The free inputs of a window on which a choice that only one side makes depends, or a count.

    Choices among integers, such as rows of a table to skip, are for inputs that hold integers.

    Args:
        window: what changed.
        free: inputs that may be any floats.
        chosen: the choices of the two sides that the other side does not make.
        counts: the computed integers that the window takes.
    """
    taken: set[str] = set()
    for gm, calls in zip((window.before, window.after), chosen, strict=True):
        nodes = {node.name: node for node in gm.graph.nodes}
        for name in (*(call.name for call in calls), *counts):
            taken |= {node.name for node in ancestors(nodes[name])} if name in nodes else set(free)
    return [name for name in free if name in taken]


def _describe_call(node: fx.Node, name: Callable[[fx.Node], str]) -> str:
    """Describe the target and the arguments of a node."""
    return f"{node.target}{fx.map_arg((node.args, node.kwargs), name)}"


def _computed_integers(rewriting: Rewriting, window: Window) -> list[str]:
    """Computed integers that a window takes, such as how many elements are the largest."""
    computed = {node.name for node in rewriting.before.graph.nodes if node.op == "call_function"}
    taken = zip(input_names(window), window.inputs, strict=True)
    return [n for n, v in taken if n in computed and isinstance(v, Tensor) and v.dtype in INTEGERS]


def _changed_constants(window: Window) -> tuple[list[Tensor], bool]:
    """Constants that only one side holds, and whether no pair across the sides differs by rounding alone."""
    sides = [list(constant_float_values(gm).values()) for gm in (window.before, window.after)]
    new: list[Tensor] = []
    for mine, theirs in (sides, sides[::-1]):
        for value in mine:
            if value.dim() and not any(_are_same(value, other) for other in (*theirs, *new)):
                new.append(value)
    pairs = itertools.product(*sides)
    near = any(a.shape == b.shape and not bool(where_different(a, b).any()) for a, b in pairs if a.dim())
    return new, bool(new) and not near


def _are_same(value: Tensor, other: Tensor) -> bool:
    return value.shape == other.shape and value.dtype == other.dtype and same_bits(value, other)


def where_different(old: Tensor, new: Tensor) -> Tensor:
    """Where two values of one shape differ by more than computing a constant in another way explains."""
    unit = spacing(old.double().nan_to_num(), old.dtype)
    return old.isfinite() & new.isfinite() & ((old.double() - new.double()).abs() > _MAX_ULPS * unit)


def _rounds_differently(window: Window) -> bool:
    """Whether the two sides round differently."""
    try:
        mine, theirs = (Run(gm)(cloned(window.inputs), 0) for gm in (window.before, window.after))
    except (Unsupported, *RUN_ERRORS):
        return False
    pairs = zip(mine, theirs, strict=True)
    return any(isinstance(a, Tensor) and a.shape == b.shape and not same_bits(a, b) for a, b in pairs)


def _compared_values(
    window: Window, given: Mapping[str, Any], free: Sequence[str], constants: Sequence[Tensor]
) -> Iterator[dict[str, Tensor]]:
    """Yield values of free window inputs, by name, at which what it compares may be equal."""
    numbers = numbers_in_calls(window)
    several = (_values_for_input(name, window, given, constants, numbers) for name in free)
    interleaved = filter(None, itertools.chain.from_iterable(itertools.zip_longest(*several)))
    yield from itertools.islice(
        interleaved, max(_MIN_TRIES, _MAX_CALLS_MADE // len(window.before.graph.nodes))
    )
    if free:
        generator = torch.Generator().manual_seed(len(given))
        yield {
            name: sample_input(given[name].cpu(), "ties", generator).to(given[name].device) for name in free
        }


def _values_for_input(
    name: str, window: Window, given: Mapping[str, Any], constants: Sequence[Tensor], numbers: Sequence[float]
) -> Iterator[dict[str, Tensor]]:
    value = given[name]
    if _has_reduction(window):  # a mean is on either side of a number where all elements are
        for number, beside in itertools.product(numbers[:MAX_TURNS], (0.0, 0.5, -0.5)):
            yield {name: torch.full_like(value, number + beside * (abs(number) or 1.0))}
    others = [v for other, v in given.items() if other != name and isinstance(v, Tensor)]
    held = [
        v.to(value) for v in (*constants, *others) if v.is_floating_point() and is_broadcastable(v, value)
    ]
    held = [v for v in held if bool((v.abs() < MAX_NUMBER).all())]
    rows = value.numel() // (value.shape[-1] if value.dim() else 1)
    for known, places in (
        ([sign * v for v in held for sign in (1, -1)], rows),  # each column has its own
        ([value.new_full((), number) for number in numbers], value.numel()),
    ):
        known = known[: max(_MIN_NUMBERS, _MAX_ELEMENTS // value.numel())]
        at = torch.stack([number.expand(value.shape) for number in known]) if known else value[None][:0]
        ordered = at.sort(0).values
        turns = min(MAX_TURNS, -(-2 * len(known) // places))
        for candidates, turn in itertools.product((at, (ordered[1:] + ordered[:-1]) / 2), range(turns)):
            if len(candidates):
                yield {name: interleave(value, candidates, turn * places)}


def _has_reduction(window: Window) -> bool:
    return any(torch.Tag.reduction in getattr(node.target, "tags", ()) for node in window_calls(window))


def _with_users(rewriting: Rewriting, window: Window) -> Window:
    """Extend a window of constants alone by the calls that take these, until one takes inputs."""
    nodes = {node.name: node for node in rewriting.before.graph.nodes}
    change = window.change
    while True:
        users = {
            user.name for old, _ in change.outputs for user in nodes[old].users if user.op == "call_function"
        }
        pairs = tuple((name, name) for name in sorted(users))
        change = Change(change.before | users, change.after | users, pairs)
        found = cut(rewriting.before, rewriting.after, change, rewriting.values) if users else None
        if found is None or found.inputs:
            return found or window


def extend_to_free_inputs(rewriting: Rewriting, window: Window) -> Window:
    """Extend a window to nearby inputs that may be any number, whatever the others are."""
    nodes = {node.name: node for node in rewriting.before.graph.nodes}
    others = {node.name for node in rewriting.after.graph.nodes}
    for _ in range(_MAX_CALLS):
        taken = {nodes[name] for name in input_names(window)}
        more = {
            node.name
            for node in taken
            if node.name in others
            and _can_extend_by(node)
            and not (is_free(node) and all(is_independent(node, other) for other in taken))
        }
        change = window.change
        wider = Change(change.before | more, change.after | more, change.outputs)
        found = cut(rewriting.before, rewriting.after, wider, rewriting.values) if more else None
        if found is None:
            break
        window = found
    return window


def _can_extend_by(node: fx.Node) -> bool:
    """Whether to extend a window by a call: pointwise, a reduction, moving elements, or a view of such."""
    if packet(node) in _MOVING_OPS or not _FOLLOWED_TAGS.isdisjoint(getattr(node.target, "tags", ())):
        return True
    (given, *others) = node.all_input_nodes or [node]
    return packet(node) in PASS_THROUGH_OPS and not others and (_can_extend_by(given) or is_free(given))


def _compare_whole_graphs(
    rewriting: Rewriting,
    window: Window,
    values: Mapping[str, Tensor],
    where: str,
    after: Mapping[str, str] | None = None,
) -> Counterexample:
    """Compare both graphs with window inputs set to these values.

    Args:
        rewriting: the graphs.
        window: what changed.
        values: the values, by name.
        where: what they are, in words.
        after: the graph after's name of a value, if it differs.
    """
    found = with_values_as_inputs(rewriting, values, where, after)
    names = [
        str(node.target).removesuffix("_given") for node in found.before.graph.find_nodes(op="placeholder")
    ]
    wide = [values.get(name, v) for name, v in zip(names, found.inputs, strict=True)]
    differences = differences_in_float64(found.before, found.after, wide, JUMP) or []
    if differences and _is_at_a_pole(rewriting, window, found.before, wide):
        differences = differences_in_float64(found.before, found.after, wide, JUMP, numbers_only=True) or []
    if differences and rewriting.is_explained_by_constants(found.before, found.after, wide):
        differences = []
    calls = window.change.names
    return dataclasses.replace(
        found, differences=[Difference(d.position, d.problem, calls) for d in differences]
    )


def _is_at_a_pole(
    rewriting: Rewriting, window: Window, before: fx.GraphModule, inputs: Sequence[Any]
) -> bool:
    """Whether a changed value is infinite in float64 before, and nothing keeps that from spreading.

    For example 1 / 0 may be multiplied by zero then.
    """
    run = ExactRun(before, keep=True)
    if run.results(inputs) is None or had_guards(rewriting.before, rewriting.after, window.change.before):
        return False
    taken = [run.values.get(name) for name in window.change.before]
    return any(
        isinstance(v, Tensor) and v.is_floating_point() and bool(computable(v).isinf().any()) for v in taken
    )
