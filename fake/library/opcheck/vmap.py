"""Compare a registered vmap rule with a loop."""

from __future__ import annotations

from typing import Any

import torch

from fake.library.opcheck.call_memory import same_values
from fake.library.opcheck.result import Evidence, Fault
from fake.library.opcheck.sample_calls import Call, attempt, flat_tensors
from fake.seam import library as _torch

_BATCH = 3


def check(op: Any, call: Call) -> str:
    """Run ``torch.vmap`` with every tensor batched, and with each alone, in the first and last dimension.

    Raises:
        Fault: the values differ from calling the operator for each element of the batch.
    """
    if not _torch.has_vmap_rule(op):
        return "no vmap rule"
    call = call.detached()
    tensors = [t for t in call.tensors if t.layout is torch.strided]
    names = dict(zip(map(id, call.tensors), call.tensor_names(), strict=True))
    choices = [("all tensors", tensors), *((names[id(t)], [t]) for t in tensors if len(tensors) > 1)]
    for label, batched in choices:
        for dim in (0, -1):
            _compare(op, call, batched, dim, f"{label} batched in dimension {dim}")
    return ""


def _compare(op: Any, call: Call, batched: list[torch.Tensor], dim: int, label: str) -> None:
    """Raise ``Fault`` if the vmap rule gives other values than a loop over the batch."""

    def element(tensor: torch.Tensor, index: int) -> torch.Tensor:
        return tensor.roll(index, 0) if tensor.dim() else tensor + index

    def run(*stacks: torch.Tensor) -> Any:
        given = dict(zip(map(id, batched), stacks, strict=True))
        inner = call.map(lambda t: given.get(id(t), t))
        return op(*inner.args, **inner.kwargs)

    loop = [
        attempt(lambda i=i: run(*(element(t, i) for t in batched)), Call((), {}))  # type: ignore[misc]
        for i in range(_BATCH)
    ]
    if any(one.error is not None for one in loop):
        return
    columns = zip(*(flat_tensors(one.value) for one in loop), strict=True)
    if any(len({t.shape for t in column}) > 1 for column in columns):
        return
    expected = [
        torch.stack(column) for column in zip(*(flat_tensors(one.value) for one in loop), strict=True)
    ]
    stacks = [torch.stack([element(t, i) for i in range(_BATCH)], dim=dim) for t in batched]
    outcome = attempt(lambda: torch.vmap(run, in_dims=dim, randomness="same")(*stacks), Call((), {}))
    if outcome.error is not None:
        return  # a rule may refuse what it does not support: then nothing wrong is computed
    said = tuple(
        Evidence(f"output {index}", "the values of a loop over the batch", "others", call.describe())
        for index, (mine, theirs) in enumerate(zip(expected, flat_tensors(outcome.value), strict=True))
        if not same_values(mine, theirs, call.tolerances)
    )
    if said:
        raise Fault(
            f"the vmap rule is wrong with {label}",
            evidence=said,
            fix="in_dims names the batched dimension of each argument (None where it has none): move it with movedim, "
            "and say in out_dims where it is in each output",
        )
