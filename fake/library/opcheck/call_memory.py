"""How a call uses memory: which arguments it mutates, and whose memory its outputs share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fake.library.opcheck.result import Evidence
from fake.library.opcheck.sample_calls import Call, attempt, flat_tensors, named_tensors
from fake.seam import library as _torch

_ALIAS_FIX = "return a clone instead of the argument, the other output, or a view of it"
OWN_MEMORY_FIX = "return a tensor of its own: a clone of what the kernel keeps between calls"


@dataclass(frozen=True)
class MemoryProblem:
    """A use of memory that the schema does not declare; ``text`` is empty if there is none."""

    text: str = ""
    evidence: tuple[Evidence, ...] = ()
    fix: str = ""


def compare_memory(op: Any, call: Call) -> MemoryProblem | None:
    """Compare how a call uses memory with the schema; None if the kernel refuses the call."""
    copied = call.copy()
    before = [(n, a, t, t.detach().clone()) for n, a, t in named_tensors(op._schema, copied)]
    outcome = attempt(lambda *_, **__: op(*copied.args, **copied.kwargs), Call((), {}))
    inputs = call.describe()
    if _torch.refuses_aliasing(outcome.error):
        said = Evidence("outputs", "memory of their own", "memory of an argument or of each other", inputs)
        return MemoryProblem(
            "an output is in the memory of an argument or of another output", (said,), _ALIAS_FIX
        )
    if outcome.error is not None:
        return None
    for name, argument, tensor, values in before:
        written = argument.alias_info is not None and argument.alias_info.is_write
        if not written and not same_bits(values, tensor):
            return MemoryProblem(
                f"Argument {name} is not defined as mutable but was mutated",
                (Evidence(f"argument {name}", "unchanged values", "other values after the call", inputs),),
                f"add {name.split('[')[0]!r} to mutates_args (in a schema: 'Tensor(a!)'), or work on a clone",
            )
    return _shared(op, before, flat_tensors(outcome.value), inputs) or MemoryProblem()


def _shared(op: Any, before: list[Any], outputs: list[torch.Tensor], inputs: str) -> MemoryProblem | None:
    if any(r.alias_info is not None for r in op._schema.returns):
        return None
    owners = {_torch.storage_of(t): f"argument {n}" for n, _, t, _ in before if t.numel()}
    for index, output in enumerate(outputs):
        storage = _torch.storage_of(output)
        if storage is None or not output.numel():
            continue
        if storage in owners:
            owner = owners[storage]
            return MemoryProblem(
                f"{owner.replace('argument', 'Argument')} is not defined to alias output but was aliasing"
                if owner.startswith("argument")
                else f"output {index} is in the memory of {owner}, which a schema cannot express",
                (Evidence(f"output {index}", "memory of its own", f"memory of {owner}", inputs),),
                _ALIAS_FIX,
            )
        owners[storage] = f"output {index}"
    return None


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors hold the same values, where NaN equals NaN."""
    if left.layout is not torch.strided:
        return True
    return (
        left.shape == right.shape
        and torch.equal(torch.isnan(left), torch.isnan(right))
        and bool(((left == right) | torch.isnan(left)).all())
    )


def same_values(left: torch.Tensor, right: torch.Tensor, tolerances: Mapping[str, float]) -> bool:
    """Return whether two results are equal up to the order of summation.

    Args:
        left: one result.
        right: the other, of the same dtype.
        tolerances: ``rtol`` and ``atol``, instead of those that follow from the dtype.
    """
    if left.layout is not torch.strided or right.layout is not torch.strided or left.shape != right.shape:
        return left.shape == right.shape
    if not (left.is_floating_point() or left.is_complex()):
        return bool((left == right).all())
    loose = left.dtype in (torch.float16, torch.bfloat16)
    wide = torch.complex128 if left.is_complex() else torch.float64
    scale = float(left.abs().nan_to_num(0.0, 0.0, 0.0).max()) if left.numel() else 0.0
    allowed = {"rtol": 1e-2, "atol": (3e-2 if loose else 1e-4) * max(scale, 1e-6)}
    return torch.allclose(left.to(wide), right.to(wide), equal_nan=True, **(tolerances or allowed))
