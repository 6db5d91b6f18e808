"""Inputs that show what a pass changed of a value that few inputs ask for: elements that an activation, a comparison or an index hides.

Random inputs seldom come near the bound of a clamp that a constant decides, or read one row of a table. Where a pass left another value than
there was, inputs are made of the elements that differ: these numbers themselves, of either sign, and the rows in which they stand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.checking.inputs import Unsupported, cloned, made_up, placeholders, scaled
from fxpasses.checking.interpret import CANNOT_RUN, Run, allocates
from fxpasses.checking.rounding import spacing
from fxpasses.checking.windows import changed_nodes
from fxpasses.graphs.aliasing import is_mutating, is_random
from fxpasses.graphs.rewriting import value_of

_SEED = 20
_MOST_CALLS = 16
"""Calls by which a value is computed from inputs."""
_MOST_VALUES = 4
_MOST_INPUTS = 8
_ROUNDINGS = 64
"""Units in the last place by which computing a constant otherwise may move it."""
_POWERS = (4, 8, 12, 16)
_BEYOND = {torch.bfloat16: 2**8 + 44, torch.float16: 2**11 + 52}
"""Sizes at which not all positions are numbers of a type any more."""
_SIZES = (16, 2048)
_MOST_SIZES = 3


def telling_inputs(
    before: fx.GraphModule, after: fx.GraphModule, inputs: Sequence[Any], generator: torch.Generator
) -> Iterator[tuple[list[Any], str]]:
    """Inputs at which constants, or rows of tables, that a pass changed make a difference.

    Args:
        before: the graph before the pass.
        after: the graph after.
        inputs: real ones.
        generator: of random numbers.

    Yields:
        Inputs, and what they are.
    """
    pairs = list(_values_that_differ(before, after, inputs))[:_MOST_VALUES]
    if not pairs:
        return
    usual = made_up(inputs, "random", generator)
    for old, new, is_constant in pairs:
        differs = _differs(old, new)
        for at, value in list(enumerate(inputs))[:_MOST_INPUTS]:
            if not isinstance(value, Tensor) or not value.numel():
                continue
            if value.dtype in (torch.int32, torch.int64):
                for dim in range(old.dim()):
                    yield _with(inputs, at, _rows(value, differs, dim, generator)), "rows that a pass changed"
            elif is_constant and value.is_floating_point():
                for sign in (1.0, -1.0):
                    near = _near(usual[at], old, new, sign, generator)
                    if near is not None:
                        yield _with(usual, at, near), "numbers near a constant that a pass changed"
    if any(is_constant for _, _, is_constant in pairs):
        for power in _POWERS:
            yield scaled(made_up(inputs, "random", generator), 2.0**power), f"random, times 2**{power}"


def telling_sizes(before: fx.GraphModule, after: fx.GraphModule) -> list[int]:
    """Sizes just beyond a number that a changed call holds, or beyond the integers that a type has to which a pass casts."""
    found: dict[int, None] = {}
    for gm, names in zip((before, after), changed_nodes(before, after), strict=True):
        for node in gm.graph.nodes:
            if node.name not in names or node.op != "call_function":
                continue
            given, made = (
                value_of(node.all_input_nodes[0]) if node.all_input_nodes else None,
                value_of(node),
            )
            if (
                gm is after
                and isinstance(given, Tensor)
                and isinstance(made, Tensor)
                and given.dtype != made.dtype
            ):
                found |= {size: None for dtype, size in _BEYOND.items() if made.dtype is dtype}
            numbers = [abs(n) for n in node.args if isinstance(n, (int, float)) and math.isfinite(n)]
            found |= {int(n) + 2: None for n in numbers if _SIZES[0] <= n <= _SIZES[1]}
    return list(found)[:_MOST_SIZES]


def _values_that_differ(
    before: fx.GraphModule, after: fx.GraphModule, inputs: Sequence[Any]
) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Values that calls take in both graphs, as each computes them, and whether they are constants.

    Of constants, those that meet what depends on inputs; of others, what is changed itself and taken beside integers.
    """
    changed = changed_nodes(before, after)
    theirs = {node.name: node for node in before.graph.nodes}
    touched: set[fx.Node] = set()
    for node in after.graph.nodes:
        if node.name in changed[1] or any(value in touched for value in node.all_input_nodes):
            touched.add(node)
    fixed = {gm: _fixed(gm) for gm in (before, after)} if touched else {}
    seen = set()
    for user in after.graph.nodes:
        other = theirs.get(user.name)
        if user not in touched or user in fixed[after] or other is None or other.target != user.target:
            continue
        for old, new in zip(other.all_input_nodes, user.all_input_nodes, strict=False):
            is_constant = old in fixed[before] and new in fixed[after] and new in touched
            is_changed = old.name in changed[0] or new.name in changed[1]
            if (old, new) in seen or not (is_constant or (is_changed and _takes_integers(user))):
                continue
            seen.add((old, new))
            values = _computed(before, old, inputs), _computed(after, new, inputs)
            if _are_comparable(*values) and bool(_differs(*values).any()):
                yield values[0].double(), values[1].double(), is_constant


def _fixed(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes that depend on no input."""
    found: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op == "get_attr" or (
            node.op == "call_function" and all(value in found for value in node.all_input_nodes)
        ):
            found.add(node)
    return found


def _takes_integers(node: fx.Node) -> bool:
    values = (value_of(value) for value in node.all_input_nodes)
    return any(isinstance(v, Tensor) and v.dtype in (torch.int32, torch.int64) for v in values)


def _are_comparable(old: Any, new: Any) -> bool:
    if not isinstance(old, Tensor) or not isinstance(new, Tensor) or old.shape != new.shape or not old.dim():
        return False
    return old.is_floating_point() and new.is_floating_point()


def _origin(gm: fx.GraphModule, node: fx.Node) -> set[fx.Node] | None:
    """A node and those that it is computed from; ``None`` for more than a few, or where its value is not theirs alone."""
    found: set[fx.Node] = set()
    todo = [node]
    while todo:
        one = todo.pop()
        if one in found:
            continue
        found.add(one)
        is_call = one.op == "call_function"
        if len(found) > _MOST_CALLS or (is_call and (is_random(one) or allocates(gm, [one.name]))):
            return None
        if is_mutating(one) or any(map(is_mutating, one.users)):
            return None
        todo += one.all_input_nodes
    return found


def _computed(gm: fx.GraphModule, node: fx.Node, inputs: Sequence[Any]) -> Any:
    given = {n.name: value for n, value in zip(placeholders(gm), inputs, strict=False)}
    origin = _origin(gm, node)
    if origin is None or node.op == "placeholder":
        return given.get(node.name)
    run = Run(gm)
    try:
        if node.op == "get_attr":
            return run.run_node(node)
        return run.part({n.name for n in origin if n.op == "call_function"}, given, _SEED)[node.name]
    except (Unsupported, *CANNOT_RUN):
        return None


def _differs(old: Tensor, new: Tensor) -> Tensor:
    """Where two values are others, by more than rounding."""
    unit = spacing(old.double().nan_to_num(), old.dtype)
    return old.isfinite() & new.isfinite() & ((old.double() - new.double()).abs() > _ROUNDINGS * unit)


def _rows(value: Tensor, differs: Tensor, dim: int, generator: torch.Generator) -> Tensor:
    rows = differs.nonzero()[:, dim].cpu()
    chosen = rows[torch.randint(len(rows), value.shape, generator=generator)]
    return chosen.to(value.device, value.dtype)


def _near(value: Tensor, old: Tensor, new: Tensor, sign: float, generator: torch.Generator) -> Tensor | None:
    """An input with numbers between two constants where these differ; ``None`` for another shape."""
    middle, gap, differs = (old + new) / 2, new - old, _differs(old, new)
    if middle.numel() == value.numel():
        middle, gap, differs = (t.reshape(value.shape) for t in (middle, gap, differs))
    shape = list(value.shape)
    sizes = zip(reversed(middle.shape), reversed(shape), strict=False)
    if middle.dim() > value.dim() or any(size not in (1, whole) for size, whole in sizes):
        return None
    noise = (torch.rand(shape, generator=generator).to(value.device) - 0.5) / 2
    near = torch.where(differs.to(value.device), (sign * middle + gap * noise).to(value.dtype), value)
    return near if bool(near.isfinite().all()) else None


def _with(inputs: Sequence[Any], at: int, value: Tensor) -> list[Any]:
    copies = cloned(inputs)
    copies[at].copy_(value)
    return copies
