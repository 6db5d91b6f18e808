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
from fxpasses.exact.folded_numbers import (
    basis_of,
    powers_of,
    residues_of_sum,
    simple_candidates,
    value_of_sum,
)
from fxpasses.exact.machine import is_random
from fxpasses.graphs.rewriting import constants_of, same_constant

_TOLERANCE = 2e-15
"""A few units in the last place of double precision."""
_MAX_DISTINCT = 1024
_FLOAT32_HALF_ULP = 2.0**-24


def new_constants(before: fx.GraphModule, after: fx.GraphModule) -> dict[str, Tensor]:
    """Return the float tensors that only the second graph holds, by attribute name."""
    old_constants = list(constants_of(before).values())
    return {
        name: value
        for name, value in constants_of(after).items()
        if value.is_floating_point() and not any(same_constant(value, other) for other in old_constants)
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
    input_independent = list(_input_independent_values(before, values))
    basis = basis_of(before.graph, after.graph)
    found = {}
    for name, value in new_constants(before, after).items():
        source = next(
            (exact for exact, own in input_independent if _is_rounded_from(value, exact, own)), None
        )
        unrounded = (
            _unrounded_elements(value, basis, arithmetic) if source is None else _reshape(source, value.shape)
        )
        if unrounded is not None:
            found[name] = unrounded.as_type(value.dtype)
    return found


def _reshape(value: Dual, shape: torch.Size) -> Dual:
    return value.map(lambda t: t.reshape(shape))


def _input_independent_values(gm: fx.GraphModule, values: Mapping[str, Any]) -> Iterator[tuple[Dual, Tensor]]:
    """Yield what a graph computes from no input, also in its own dtypes."""
    env: dict[fx.Node, Any] = {}
    run = fx.Interpreter(gm)
    for node in gm.graph.nodes:
        is_call = (
            node.op == "call_function"
            and not is_random(node.target)
            and all(n in env for n in node.all_input_nodes)
        )
        if node.op == "get_attr" or is_call:
            value = values.get(node.name)
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            with torch.no_grad():
                env[node] = getattr(run, node.op)(node.target, args, kwargs)
            if isinstance(value, Dual):
                yield value, env[node]


def _is_rounded_from(value: Tensor, exact: Dual, own: Tensor) -> bool:
    """Whether a tensor holds certain values rounded to its dtype, either directly or from their own dtype."""
    if value.numel() != exact.witness.numel() or [n for n in value.shape if n > 1] != [
        n for n in exact.shape if n > 1
    ]:
        return False
    exact_values, rounded_values = exact.witness.reshape(value.shape), value.double()
    near = (exact_values - rounded_values).abs() <= (
        _TOLERANCE * rounded_values.abs() if value.dtype is torch.float64 else 0.0
    )
    near |= exact_values.to(value.dtype) == value
    return bool(near.all()) or torch.equal(own.reshape(value.shape).to(value.dtype), value)


def _unrounded_elements(value: Tensor, basis: tuple[float, ...], arithmetic: Arithmetic) -> Dual | None:
    """Read elements as powers of one number, or as other numbers computed from a few; else ``None``."""
    distinct, at = value.double().unique(return_inverse=True)
    if not basis or len(distinct) > _MAX_DISTINCT or not bool(distinct.isfinite().all()):
        return None
    half_ulp = torch.finfo(value.dtype).eps / 2
    for candidates in (
        *map(powers_of, basis),
        *([simple_candidates(basis)] if half_ulp <= _FLOAT32_HALF_ULP else []),
    ):
        sums = [
            candidates.find_near(number, max(half_ulp, _TOLERANCE)) if number else ()
            for number in distinct.tolist()
        ]
        known = [one for one in sums if one is not None]
        if len(known) == len(sums):
            witness = torch.tensor(list(map(value_of_sum, known)), dtype=torch.float64)
            rows = torch.tensor([residues_of_sum(arithmetic.field, one) for one in known])
            return Dual(witness[at], list(rows[at].unbind(-1)), value.dtype)
    return None
