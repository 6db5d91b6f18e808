"""What the tensors that a rewrite computed, and that a graph now holds, were rounded from.

A tensor of the graph after that the graph before does not hold may be the rounding of something that graph
computes from no input. Else its elements may be powers of a number, or other numbers computed from those of
the graph before (:mod:`fxpasses.exact.folded_numbers`). If the graph is the same function with the tensor
read so, it is the same except for half a unit in the last place of the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.exact.arithmetic import Arithmetic
from fxpasses.exact.dual import Dual
from fxpasses.exact.folded_numbers import basis_of, few_candidates, powers_of, residues_of_sum, value_of_sum
from fxpasses.exact.machine import is_random
from fxpasses.graphs.rewriting import constants_of, same_constant

_NEAR = 2e-15
"""A few units in the last place of double precision."""
_MOST_DISTINCT = 1024
_FINE = 2.0**-24


def new_constants(before: fx.GraphModule, after: fx.GraphModule) -> dict[str, Tensor]:
    """Return the float tensors that only the second graph holds, by attribute name."""
    held = list(constants_of(before).values())
    return {
        name: value
        for name, value in constants_of(after).items()
        if value.is_floating_point() and not any(same_constant(value, other) for other in held)
    }


def unrounded_constants(
    before: fx.GraphModule, values: Mapping[str, Any], after: fx.GraphModule, arithmetic: Arithmetic
) -> dict[str, Dual]:
    """Return what the tensors that only the second graph holds were rounded from, by attribute name.

    Args:
        before: a graph.
        values: what it computes on a sample, by node name.
        after: what a rewrite made of it.
        arithmetic: the arithmetic of the values.
    """
    fixed = list(_fixed(before, values))
    basis = basis_of(before.graph, after.graph)
    found = {}
    for name, value in new_constants(before, after).items():
        source = next((of for of, own in fixed if _is_rounded_from(value, of, own)), None)
        read = _of_numbers(value, basis, arithmetic) if source is None else _seen_as(source, value.shape)
        if read is not None:
            found[name] = read.as_type(value.dtype)
    return found


def _seen_as(value: Dual, shape: torch.Size) -> Dual:
    return value.map(lambda t: t.reshape(shape))


def _fixed(gm: fx.GraphModule, values: Mapping[str, Any]) -> Iterator[tuple[Dual, Tensor]]:
    """Yield what a graph computes from no input, also in its own dtypes."""
    own: dict[fx.Node, Any] = {}
    run = fx.Interpreter(gm)
    for node in gm.graph.nodes:
        is_call = (
            node.op == "call_function"
            and not is_random(node.target)
            and all(n in own for n in node.all_input_nodes)
        )
        if node.op == "get_attr" or is_call:
            value = values.get(node.name)
            args, kwargs = fx.map_arg((node.args, node.kwargs), own.__getitem__)
            with torch.no_grad():
                own[node] = getattr(run, node.op)(node.target, args, kwargs)
            if isinstance(value, Dual):
                yield value, own[node]


def _is_rounded_from(value: Tensor, of: Dual, own: Tensor) -> bool:
    """Whether a tensor holds certain values rounded to its dtype, either directly or from their own dtype."""
    if value.numel() != of.witness.numel() or [n for n in value.shape if n > 1] != [
        n for n in of.shape if n > 1
    ]:
        return False
    exact, held = of.witness.reshape(value.shape), value.double()
    near = (exact - held).abs() <= (_NEAR * held.abs() if value.dtype is torch.float64 else 0.0)
    near |= exact.to(value.dtype) == value
    return bool(near.all()) or torch.equal(own.reshape(value.shape).to(value.dtype), value)


def _of_numbers(value: Tensor, basis: tuple[float, ...], arithmetic: Arithmetic) -> Dual | None:
    """Read elements as powers of one number, or as other numbers computed from a few; else ``None``."""
    distinct, at = value.double().unique(return_inverse=True)
    if not basis or len(distinct) > _MOST_DISTINCT or not bool(distinct.isfinite().all()):
        return None
    half_a_unit = torch.finfo(value.dtype).eps / 2
    for candidates in (*map(powers_of, basis), *([few_candidates(basis)] if half_a_unit <= _FINE else [])):
        sums = [
            candidates.near(number, max(half_a_unit, _NEAR)) if number else () for number in distinct.tolist()
        ]
        known = [one for one in sums if one is not None]
        if len(known) == len(sums):
            witness = torch.tensor(list(map(value_of_sum, known)), dtype=torch.float64)
            rows = torch.tensor([residues_of_sum(arithmetic.field, one) for one in known])
            return Dual(witness[at], list(rows[at].unbind(-1)), value.dtype)
    return None
