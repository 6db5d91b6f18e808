"""What a plan does after its graphs, as AOTAutograd would: recreate outputs that alias inputs or other
outputs, and mutate inputs where autograd has to see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fxpasses.plans.tensors._torch_views import apply_views, deserialize_views

Graph = Callable[[list[Any]], Sequence[Any]]


class Hidden:
    """A tensor in an output that is hidden from autograd."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def hidden_outputs(facts: Mapping[str, Any]) -> list[int]:
    """The outputs of a graph that are :class:`Hidden` from autograd. For ``facts`` see
    :func:`with_aliasing`."""
    changed = enumerate(facts["updated"])
    first = len(facts["updated"])
    return [i for i, (_, data, _, _) in changed if not data] + [first + i for i, *_ in facts["aliases"]]


def with_aliasing(facts: Mapping[str, Any], run: Graph) -> Graph:
    """Wrap a graph to return what it stands for.

    Args:
        facts: ``updated``: for each of the first outputs, the input that it updates, whether that changes
            values and metadata, and whether it is a leaf; ``aliases``: number, kind and base of each output
            that shares memory, whether it requires grad, and its views.
        run: the graph; takes a list, which it empties.
    """
    updated, aliases, outputs = facts["updated"], facts["aliases"], facts["outputs"]
    if not updated and not aliases:
        return run
    inputs = sorted({i for i, *_ in updated} | {base for _, kind, base, *_ in aliases if kind != "output"})
    made = [
        (*alias[:4], None if alias[4] is None else deserialize_views(alias[4])) for alias in aliases
    ]  # decoded once for all calls

    def run_with_aliasing(given: list[Any]) -> Sequence[Any]:
        of_inputs = {i: given[i] for i in inputs}
        results = run(given)
        for (i, *how), value in zip(updated, results, strict=False):
            _mutate(of_inputs[i], _unhidden(value), *how)
        results = results[len(updated) :]
        returned = list(results[:outputs])
        for i, kind, number, requires_grad, views in made:
            base = _unhidden(results[number]) if kind == "output" else of_inputs[number]
            returned[i] = (
                base if kind == "input" else _alias(base, _unhidden(results[i]), requires_grad, views)
            )
        return returned

    return run_with_aliasing


def _unhidden(value: Any) -> Any:
    return value.tensor if isinstance(value, Hidden) else value


def _mutate(tensor: torch.Tensor, value: torch.Tensor, data: bool, metadata: bool, is_leaf: bool) -> None:
    if metadata:
        tensor.as_strided_(value.size(), value.stride(), value.storage_offset())
    if data and is_leaf and tensor.requires_grad:
        tensor.detach().copy_(value)  # mutated behind autograd, which would raise
    elif data:
        tensor.copy_(value)


def _alias(
    base: torch.Tensor, like: torch.Tensor, requires_grad: bool, views: list[Any] | None
) -> torch.Tensor:
    if views is None:
        made = base.as_strided(like.size(), like.stride(), like.storage_offset())
    else:
        made = apply_views(base, views)
    if base.requires_grad and not requires_grad:
        return made.detach()
    if requires_grad and not base.requires_grad:
        made.requires_grad_(True)
    return made
