"""The calls of a window that choose between values, and the numbers that they compare with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fake.seam.pytree import tree_leaves
from fxpasses.checking.comparison.windows import Window
from fxpasses.checking.critical.free_values import packet
from fxpasses.checking.execution.interpret import ExactRun
from fxpasses.exact.bounds import accepts_input
from fxpasses.exact.samples import is_unconstrained_integer
from fxpasses.graphs.rewriting import value_of

aten, prims = torch.ops.aten, torch.ops.prims

MAX_NUMBER, _MAX_NUMBERS = 1e6, 64
"""The largest number that is not a mask, and how many numbers to try."""
MAX_TURNS = 8
"""How many numbers each element of an input takes in sequence, if it has few elements."""
_MIN_COMPARISONS, _DRAWS, _MAX_SEARCH_SIZE = 3, 8, 400
"""From how many comparisons on to search where they meet, among how many draws of each input.

The last one bounds the size of the graph (calls times inputs).
"""
_ROUNDING_OPS = {*(aten.round, aten.floor, aten.ceil, aten.trunc, aten.remainder, aten.fmod)}
_BUILT_IN_NUMBERS = {
    **dict.fromkeys((aten.hardswish, aten.hardsigmoid), (3.0,)),
    **dict.fromkeys(_ROUNDING_OPS, (0.5, 1.0, 1.5, 2.5)),
}
"""Numbers that are built into operators."""
_PIECEWISE_OPS = {
    *(aten.maximum, aten.minimum, aten.amax, aten.amin, aten.max, aten.min, aten.argmax, aten.argmin),
    *(aten.sort, aten.topk, aten.median, aten.kthvalue, aten.mode, aten.cummax, aten.cummin),
    *(aten.max_pool2d_with_indices, aten.max_pool3d_with_indices, aten.adaptive_max_pool2d),
    *(aten.clamp, aten.clamp_min, aten.clamp_max, aten.hardtanh, aten.fmax, aten.fmin, aten.threshold),
    *(aten.huber_loss, aten.smooth_l1_loss, aten.softshrink, aten.hardshrink, aten.celu, aten.relu6),
    *(aten.relu, aten.abs, aten.sign, aten.sgn, aten.leaky_relu, aten.elu, aten.prelu, aten.heaviside),
    *(prims.fmax, prims.fmin, prims._low_memory_max_pool_with_offsets, *_BUILT_IN_NUMBERS),
}


def window_calls(window: Window) -> list[fx.Node]:
    """Return the calls of a window in both graphs."""
    return [n for gm in (window.before, window.after) for n in gm.graph.nodes if n.op == "call_function"]


def is_piecewise(node: fx.Node) -> bool:
    """Whether a call is not an analytic function: it has jumps or kinks."""
    if node.op != "call_function":
        return False
    result, *given = (value for n in (node, *node.all_input_nodes) for value in tree_leaves(value_of(n)))
    types = {value.dtype for value in (result, *given) if isinstance(value, Tensor)}
    counts = (
        isinstance(result, Tensor)
        and not result.dtype.is_floating_point
        and any(d.is_floating_point for d in types)
    )
    return (
        torch.bool in types
        or counts
        or bool(node.kwargs.get("rounding_mode"))
        or packet(node) in _PIECEWISE_OPS
    )


def numbers_in_calls(window: Window) -> list[float]:
    """Return the numbers in a window's calls, with either sign, then their quotients, sums and products."""
    held: dict[float, None] = {0.0: None}
    inside: dict[float, None] = {}
    for node in window_calls(window):
        if torch.Tag.pointwise in getattr(node.target, "tags", ()) or packet(node) in _PIECEWISE_OPS:
            written: list[Any] = [*node.args, *node.kwargs.values()]
            held |= {float(n): None for n in written if type(n) in (int, float) and abs(n) < MAX_NUMBER}
            inside |= dict.fromkeys(_BUILT_IN_NUMBERS.get(packet(node), ()))
    # Rounding has ties at halves of its argument, so at halves times a scale of an input.
    scaled = [(a, b) for a, b in itertools.product(inside, held) if b]
    pairs = [(a, b) for a, b in itertools.product((*held, *inside), repeat=2) if a and b]
    made = [*held, *inside, *(a * b for a, b in scaled), *(a / b for a, b in scaled)]
    made += [*(a / b for a, b in pairs), *(a + b for a, b in pairs), *(a - b for a, b in pairs)]
    made += [a * b for a, b in pairs]
    short = (float(f"{sign * n:.13g}") for n in made for sign in (1, -1))  # 3, not 2.9999999999999996
    return list(dict.fromkeys(short))[:_MAX_NUMBERS]


def is_broadcastable(constant: Tensor, value: Tensor) -> bool:
    """Whether a tensor can be expanded to the shape of another. Args: the one, and the other."""
    pairs = zip(reversed(constant.shape), reversed(value.shape), strict=False)
    return constant.dim() <= value.dim() and all(size in (1, whole) for size, whole in pairs)


def interleave(value: Tensor, candidates: Tensor, start: int) -> Tensor:
    """Cycle through the elements of several tensors, interleaved with those of the value itself.

    Args:
        value: a tensor of any shape.
        candidates: tensors of that shape, stacked: ``[n, *shape]``.
        start: where the cycle starts; a multiple of the number of elements gives other ones.

    Returns: a tensor of the shape of ``value``.
    """
    flat, others = value.flatten(), candidates.reshape(len(candidates), -1)
    count, columns = 2 * len(others), value.shape[-1] if value.dim() else 1
    while math.gcd(count, columns) > 1:  # each column meets all candidates
        count += 1
    position = torch.arange(flat.numel(), device=flat.device)
    turn = (position + start) % count
    taken = others[(turn // 2).clamp(max=len(others) - 1), position]
    return torch.where((turn % 2 == 0) & (turn < 2 * len(others)), taken, flat).view(value.shape)


def inputs_at_comparisons(gm: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[list[Any]]:
    """Yield inputs at which each of several comparisons that meet matters; none for fewer than two numbers.

    First those at which as many comparisons hold at one place as a search finds, and as few; then draws of
    each element on either side of a number that the graph compares with.

    Args:
        gm: the graph.
        inputs: of it.
    """
    sides = _DrawsAroundNumbers(gm, inputs)
    drawn = [sides.draw(seed) for seed in range(_DRAWS)] if sides.has_several_numbers else []
    compared = [n.name for n in gm.graph.nodes if _is_comparison(n)]
    places = [i for i, v in enumerate(inputs) if isinstance(v, Tensor) and v.dtype is not torch.bool]
    is_searched = len(compared) >= _MIN_COMPARISONS and len(places) * len(gm.graph.nodes) <= _MAX_SEARCH_SIZE
    for wanted in (True, False) if drawn and is_searched else ():
        best, most = list(inputs), _count_matching_comparisons(gm, inputs, compared, wanted)
        for at, side in itertools.product(places, drawn):
            tried = [*best[:at], side[at], *best[at + 1 :]]
            if (found := _count_matching_comparisons(gm, tried, compared, wanted)) > most:
                best, most = tried, found
        yield best
        integers = (at for at in places if not inputs[at].is_floating_point())
        yield from ([*best[:at], inputs[at], *best[at + 1 :]] for at in integers)
    yield from drawn


def draw_around_numbers(gm: fx.GraphModule, inputs: Sequence[Any], seed: int) -> list[Any] | None:
    """Draw inputs whose elements are on either side of a number that the graph compares with.

    Args:
        gm: the graph.
        inputs: of it.
        seed: of random numbers.

    Returns:
        The inputs; ``None`` if the graph compares with fewer than two numbers.
    """
    sides = _DrawsAroundNumbers(gm, inputs)
    return sides.draw(seed) if sides.has_several_numbers else None


class _DrawsAroundNumbers:
    """Draws of inputs on either side of the numbers that a graph compares with, as far as it accepts them.

    The numbers are those that the input itself is compared with, or else those of all computed values.

    Args:
        gm: the graph.
        inputs: of it. Integers stay in their range if the graph rejects others.

    Attributes:
        has_several_numbers: whether there are several numbers.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        compared: dict[Any, list[float]] = {
            True: [],
            False: [],
        }  # numbers compared with computed values, by whether these are floats
        for node in gm.graph.nodes:
            given = [n for n in node.all_input_nodes if isinstance(value_of(n), Tensor)]
            held = value_of(node)
            if given and isinstance(held, Tensor) and held.dtype is torch.bool:
                of = given[0] if given[0].op == "placeholder" else value_of(given[0]).is_floating_point()
                compared.setdefault(of, []).extend(
                    float(n) for n in node.args if type(n) in (int, float) and abs(n) < MAX_NUMBER
                )
        self.has_several_numbers = sum(map(len, compared.values())) > 1
        self._inputs = inputs
        self._numbers: list[list[float]] = [[] for _ in inputs]
        for at, node in enumerate(gm.graph.find_nodes(op="placeholder") if self.has_several_numbers else ()):
            value = inputs[at]
            is_float = isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0
            if is_float or is_unconstrained_integer(value):
                known = compared.get(node) or compared[is_float]
                self._numbers[at] = [n for n in known if is_float or _accepts_number(gm, inputs, at, n)]

    def draw(self, seed: int) -> list[Any]:
        """Draw all inputs once."""
        generator = torch.Generator().manual_seed(seed)
        return [
            _draw_beside_numbers(value, torch.tensor(known, dtype=torch.float64), generator)
            if known
            else value
            for value, known in zip(self._inputs, self._numbers, strict=True)
        ]


def _accepts_number(gm: fx.GraphModule, inputs: Sequence[Any], at: int, number: float) -> bool:
    value = inputs[at]
    if int(value.min()) <= number <= int(value.max()):
        return True
    is_known = abs(number) <= torch.iinfo(value.dtype).max and number.is_integer()
    return is_known and accepts_input(gm, inputs, at, torch.full_like(value, int(number)))


def _draw_beside_numbers(value: Tensor, known: Tensor, generator: torch.Generator) -> Tensor:
    """Draw floats on either side of numbers, or integers of which half are such numbers."""
    at = torch.randint(len(known), value.shape, generator=generator)
    part = torch.rand(value.shape, generator=generator, dtype=torch.float64)
    chosen = known[at]
    if value.is_floating_point():
        moved = (chosen + (2 * part - 1) * chosen.abs().clamp(min=1.0)).to(value)
        return moved.abs() if bool((value >= 0).all() & (known >= 0).all()) else moved
    return torch.where((part < 0.5).to(value.device), chosen.to(value), value)


def _is_comparison(node: fx.Node) -> bool:
    """Whether a call computes flags from something other than flags."""
    given = [value_of(n) for n in node.all_input_nodes]
    held = value_of(node)
    is_flag = node.op == "call_function" and isinstance(held, Tensor) and held.dtype is torch.bool
    return is_flag and any(isinstance(v, Tensor) and v.dtype is not torch.bool for v in given)


def _count_matching_comparisons(
    gm: fx.GraphModule, inputs: Sequence[Any], compared: Sequence[str], wanted: bool
) -> tuple[float, float]:
    """How many comparisons are as wanted: at the best place, and on average."""
    run = ExactRun(gm, keep=True)
    if run.results(inputs) is None:
        return -1.0, -1.0
    flags = [(run.values[name] == wanted).double() for name in compared]
    try:
        count = torch.stack(torch.broadcast_tensors(*flags)).sum(0)
    except RuntimeError:  # they do not broadcast
        return 0.0, sum(float(flag.mean()) for flag in flags)
    return float(count.max()), float(count.mean())
