"""The calls of a window that choose between values, and the numbers that they compare with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fake.seam.pytree import tree_leaves
from fxpasses.checking.free_values import packet
from fxpasses.checking.windows import Window
from fxpasses.exact.samples import is_any_integer
from fxpasses.graphs.rewriting import value_of

aten, prims = torch.ops.aten, torch.ops.prims

MOST, _MOST_NUMBERS = 1e6, 64
"""The largest number that a mask is not, and how many are tried."""
MOST_TURNS = 8
"""Each element of an input takes so many numbers, one after the other, of an input of few elements."""
_WHOLE = {*(aten.round, aten.floor, aten.ceil, aten.trunc, aten.remainder, aten.fmod)}
_WRITTEN_WITHOUT = {
    **dict.fromkeys((aten.hardswish, aten.hardsigmoid), (3.0,)),
    **dict.fromkeys(_WHOLE, (0.5, 1.0, 1.5, 2.5)),
}
"""Numbers that operators have in themselves."""
_CHOOSING = {
    *(aten.maximum, aten.minimum, aten.amax, aten.amin, aten.max, aten.min, aten.argmax, aten.argmin),
    *(aten.sort, aten.topk, aten.median, aten.kthvalue, aten.mode, aten.cummax, aten.cummin),
    *(aten.max_pool2d_with_indices, aten.max_pool3d_with_indices, aten.adaptive_max_pool2d),
    *(aten.clamp, aten.clamp_min, aten.clamp_max, aten.hardtanh, aten.fmax, aten.fmin, aten.threshold),
    *(aten.huber_loss, aten.smooth_l1_loss, aten.softshrink, aten.hardshrink, aten.celu, aten.relu6),
    *(aten.relu, aten.abs, aten.sign, aten.sgn, aten.leaky_relu, aten.elu, aten.prelu, aten.heaviside),
    *(prims.fmax, prims.fmin, prims._low_memory_max_pool_with_offsets, *_WRITTEN_WITHOUT),
}


def window_calls(window: Window) -> list[fx.Node]:
    """The calls of a window in both graphs."""
    return [n for gm in (window.before, window.after) for n in gm.graph.nodes if n.op == "call_function"]


def chooses(node: fx.Node) -> bool:
    """Whether a call is no analytic function: what it gives jumps, or bends."""
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
        torch.bool in types or counts or bool(node.kwargs.get("rounding_mode")) or packet(node) in _CHOOSING
    )


def written_numbers(window: Window) -> list[float]:
    """The numbers that a window is written with, of either sign, and then their quotients, sums and products."""
    held: dict[float, None] = {0.0: None}
    inside: dict[float, None] = {}
    for node in window_calls(window):
        if torch.Tag.pointwise in getattr(node.target, "tags", ()) or packet(node) in _CHOOSING:
            written: list[Any] = [*node.args, *node.kwargs.values()]
            held |= {float(n): None for n in written if type(n) in (int, float) and abs(n) < MOST}
            inside |= dict.fromkeys(_WRITTEN_WITHOUT.get(packet(node), ()))
    # A rounding has its ties at halves of what is rounded: of an input, at halves times a scale.
    scaled = [(a, b) for a, b in itertools.product(inside, held) if b]
    pairs = [(a, b) for a, b in itertools.product((*held, *inside), repeat=2) if a and b]
    made = [*held, *inside, *(a * b for a, b in scaled), *(a / b for a, b in scaled)]
    made += [*(a / b for a, b in pairs), *(a + b for a, b in pairs), *(a - b for a, b in pairs)]
    made += [a * b for a, b in pairs]
    short = (float(f"{sign * n:.13g}") for n in made for sign in (1, -1))  # not 2.9999999999999996
    return list(dict.fromkeys(short))[:_MOST_NUMBERS]


def broadcasts(constant: Tensor, value: Tensor) -> bool:
    """Whether a tensor can be expanded to the shape of another. Args: the one, and the other."""
    pairs = zip(reversed(constant.shape), reversed(value.shape), strict=False)
    return constant.dim() <= value.dim() and all(size in (1, whole) for size, whole in pairs)


def in_turn(value: Tensor, candidates: Tensor, start: int) -> Tensor:
    """The elements of several tensors in turn, with those of the value itself between.

    Args:
        value: a tensor of any shape.
        candidates: tensors of that shape, stacked: ``[n, *shape]``.
        start: which one the first element is taken from; a multiple of the number of elements gives other ones.

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


def on_either_side(gm: fx.GraphModule, inputs: Sequence[Any], seed: int) -> list[Any] | None:
    """Inputs of which each element is on one or the other side of a number that the graph compares: where several comparisons meet, each of them matters somewhere.

    Args:
        gm: the graph.
        inputs: of it.
        seed: of random numbers.

    Returns:
        The inputs, integers in the range that they had; ``None`` where the graph compares with less than two numbers.
    """
    compared: dict[Any, list[float]] = {
        True: [],
        False: [],
    }  # of inputs, and of what is computed, by whether it is float
    for node in gm.graph.nodes:
        given = [n for n in node.all_input_nodes if isinstance(value_of(n), Tensor)]
        held = value_of(node)
        if given and isinstance(held, Tensor) and held.dtype is torch.bool:
            of = given[0] if given[0].op == "placeholder" else value_of(given[0]).is_floating_point()
            compared.setdefault(of, []).extend(
                float(n) for n in node.args if type(n) in (int, float) and abs(n) < MOST
            )
    if sum(map(len, compared.values())) < 2:
        return None
    generator = torch.Generator().manual_seed(seed)

    def one(node: fx.Node, value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0
        known = torch.tensor(compared.get(node) or compared[is_float], dtype=torch.float64)
        if not len(known) or not (is_float or is_any_integer(value)):
            return value
        at = torch.randint(len(known), value.shape, generator=generator)
        part = torch.rand(value.shape, generator=generator, dtype=torch.float64)
        chosen = known[at]
        if is_float:
            moved = (chosen + (2 * part - 1) * chosen.abs().clamp(min=1.0)).to(value)
            return moved.abs() if bool((value >= 0).all()) else moved
        chosen = chosen.to(value)
        return torch.where(
            (part < 0.5).to(value.device) & (chosen >= value.min()) & (chosen <= value.max()), chosen, value
        )

    return [one(*pair) for pair in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)]
