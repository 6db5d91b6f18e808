"""Results that PyTorch leaves open: which of several equal elements ``topk``, a sort or ``mode`` picks.

https://docs.pytorch.org/docs/stable/generated/torch.sort.html says that the order of equal elements is not
preserved; for ``kthvalue``, ``median`` and ``mode`` the index is likewise that of any of them. (``max``,
``argmax`` and the like return the first.) A rewrite that picks another one is right. Probabilities that
underflow are equal, too: the graph before lost their order, not the pass. So are NaNs: a router with infinite
scores may route to any expert.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from fxpasses.checking.execution.collectives import named_arguments
from fxpasses.checking.execution.interpret import ExactRun
from fxpasses.graphs.rewriting import outputs_of

_aten = torch.ops.aten
_TOLERANCE, _LARGEST = 1e-5, torch.finfo(torch.float64).max
"""How much numbers may differ, relative to themselves, that a rewrite computes in another way."""
_TIE_DEPENDENT_OPS = {
    _aten.topk.default,
    _aten.sort.default,
    _aten.sort.stable,
    _aten.kthvalue.default,
    _aten.median.dim,
    _aten.nanmedian.dim,
    _aten.mode.default,
}


def tie_dependent_outputs(
    gm: fx.GraphModule, inputs: Sequence[Any], after: fx.GraphModule | None = None
) -> set[int]:
    """Return the positions of outputs that depend on which of several equal elements an operator picks.

    Args:
        gm: the graph before a rewrite.
        inputs: its inputs; not mutated.
        after: the graph after it. A call that gets the very same values there picks the same elements, and
            one that picks unequal elements is not another choice among equal ones.
    """
    nodes = [n for n in gm.graph.nodes if n.target in _TIE_DEPENDENT_OPS and not n.kwargs.get("stable")]
    if not nodes:
        return set()
    run = ExactRun(gm, keep=True)
    if run.results(inputs) is None:
        return set()
    if after is not None:
        nodes = [node for node in nodes if not _picks_same_elements(node, run, after, inputs)]
    tie_dependent: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.target is operator.getitem and node.args[0] in nodes:
            source, dim = node.args[0].args[0], named_arguments(node.args[0]).get("dim", -1)
            taken = run.values[node.args[0].name][0]
            if node.args[1] == 1 and _has_duplicates(run.values[source.name], taken, dim):
                tie_dependent.add(node)
        elif any(given in tie_dependent for given in node.all_input_nodes):
            tie_dependent.add(node)
    return {at for at, value in enumerate(outputs_of(gm.graph)) if value in tie_dependent}


def _picks_same_elements(node: fx.Node, run: ExactRun, after: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether the graph after makes the same call with the very same values, or takes elements not left open."""
    others = {n.name: n for n in after.graph.nodes}
    call = others.get(node.name)
    if call is None or call.target != node.target or not _keeps_users(node, after):
        return False
    other = ExactRun(after, keep=True)
    other.results(inputs)  # as far as it runs
    source, found = run.values[node.all_input_nodes[0].name], other.values.get(call.name)
    if found is None or found[1].shape != run.values[node.name][1].shape:
        return False
    if _picks_unequal(node, source, run.values[node.name][0], found[1]):
        return True
    theirs = other.values[call.all_input_nodes[0].name]
    is_same = (str(call.args), str(call.kwargs)) == (str(node.args), str(node.kwargs))
    return is_same and source.shape == theirs.shape and torch.equal(source, theirs)


def _picks_unequal(node: fx.Node, source: Tensor, taken: Tensor, indices: Tensor) -> bool:
    """Whether indices pick elements other than those that a call takes or their equals, up to rounding."""
    if not source.dim() or not source.numel():
        return False
    dim = named_arguments(node).get("dim", -1)
    if taken.dim() < source.dim():
        taken, indices = taken.unsqueeze(dim), indices.unsqueeze(dim)
    picked, taken = source.gather(dim, indices).double(), taken.double()
    if node.target is _aten.topk.default:  # perhaps in any order
        picked, taken = picked.sort(dim).values, taken.sort(dim).values
    picked, taken = (v.nan_to_num(math.nan, _LARGEST, -_LARGEST) for v in (picked, taken))
    return not bool(
        (((picked - taken).abs() <= _TOLERANCE * taken.abs()) | picked.isnan() | taken.isnan()).all()
    )


def _keeps_users(node: fx.Node, after: fx.GraphModule) -> bool:
    """Whether the users of a call's results also use them in the graph after, where the call may be dead."""
    needed: dict[str, fx.Node] = {}
    for other in reversed(after.graph.nodes):
        if other.op == "output" or other.is_impure() or any(user.name in needed for user in other.users):
            needed[other.name] = other
    for result in node.users:
        users = {user.name for user in needed[result.name].users} if result.name in needed else set()
        if any(user.name not in users for user in result.users if user.name in needed or not users):
            return False
    return True


def _has_duplicates(value: Tensor, taken: Tensor, dim: int) -> bool:
    """Whether an element that is picked from a row occurs there more than once."""
    if not value.dim() or not value.numel():
        return False
    if taken.dim() < value.dim():
        taken = taken.unsqueeze(dim)
    rows, taken = (v.movedim(dim, -1).double().contiguous() for v in (value, taken))
    count, is_nan = rows.isnan().sum(-1, keepdim=True), taken.isnan()
    rows, taken = (v.nan_to_num(math.inf, math.inf, -math.inf) for v in (rows.sort().values, taken))
    first, end = (torch.searchsorted(rows, taken, right=right) for right in (False, True))
    several = torch.minimum(end, rows.shape[-1] - count) - first > 1  # NaN sorts after all numbers
    return bool(torch.where(is_nan, count > 1, several).any())
