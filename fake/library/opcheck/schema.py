"""The schema against what the kernel does: mutation, aliasing."""

from __future__ import annotations

from typing import Any

import torch

from fake.library import _torch
from fake.library.opcheck.inputs import Call, attempt, flat_tensors, named_tensors
from fake.library.opcheck.result import CheckFailure, Evidence

__all__ = ["NAME", "check"]

NAME = "test_schema"


def check(op: Any, call: Call, tolerances: dict[str, float]) -> str:
    """Run the kernel and compare what it did to its arguments with the schema; then torch's SchemaCheckMode.

    Raises:
        CheckFailure: an argument is written to or shares memory with an output, and the schema does not say so.
    """
    copied = call.copy()
    before = [(n, a, t, _bits(t)) for n, a, t in named_tensors(op._schema, copied)]
    written: list[tuple[str, Any]] = []
    shared: list[tuple[str, Any]] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        try:
            result = run(*copied.args, **copied.kwargs)
        except Exception:  # noqa: BLE001  torch's own check below reports how it fails
            result = None
    outputs = {_storage(t) for t in flat_tensors(result) if _storage(t) is not None}
    for name, argument, tensor, bits in before:
        mutable = argument.alias_info is not None and argument.alias_info.is_write
        if not mutable and not _same_bits(bits, _bits(tensor)):
            written.append((name, argument))
        if argument.alias_info is None and _storage(tensor) in outputs:
            shared.append((name, argument))
    name = _torch.op_overload_name(op)
    try:
        _torch.torch_schema_check(op, copied_args := call.copy().args, call.copy().kwargs)
        del copied_args
    except Exception as error:
        evidence = tuple(
            Evidence(f"argument {n}", "unchanged values", "other values after the call", call.describe())
            for n, _ in written
        ) + tuple(
            Evidence(
                f"argument {n}",
                "memory that no output shares",
                "an output in the same memory",
                call.describe(),
            )
            for n, _ in shared
        )
        raise CheckFailure(NAME, name, str(error), evidence=evidence, fix=_fix(written, shared)) from error
    if written:
        raise CheckFailure(
            NAME,
            name,
            f"Argument {written[0][0]} is not defined as mutable but was mutated",
            evidence=tuple(
                Evidence(f"argument {n}", "unchanged values", "other values after the call", call.describe())
                for n, _ in written
            ),
            fix=_fix(written, shared),
        )
    if shared:
        raise CheckFailure(
            NAME,
            name,
            f"Argument {shared[0][0]} is not defined to alias output but was aliasing",
            evidence=tuple(
                Evidence(f"argument {n}", "its own memory", "memory of an output") for n, _ in shared
            ),
            fix=_fix(written, shared),
        )
    _check_outputs_apart(op, call)
    return ""


def _check_outputs_apart(op: Any, call: Call) -> None:
    if any(r.alias_info is not None for r in op._schema.returns):
        return
    outcome = attempt(lambda *a, **k: op(*a, **k), call.detached())
    seen: dict[Any, int] = {}
    for index, output in enumerate(flat_tensors(outcome.value)):
        storage = _storage(output)
        if storage is not None and storage in seen:
            raise CheckFailure(
                NAME,
                _torch.op_overload_name(op),
                f"outputs {seen[storage]} and {index} share memory, which a schema cannot express",
                evidence=(
                    Evidence(f"output {index}", "its own memory", f"memory of output {seen[storage]}"),
                ),
                fix="return a clone of one of them",
            )
        seen[storage] = index


def _fix(written: list[tuple[str, Any]], shared: list[tuple[str, Any]]) -> str:
    fixes = []
    if written:
        names = ", ".join(repr(n.split("[")[0]) for n, _ in written)
        fixes.append(f"add {names} to mutates_args (in a schema: 'Tensor(a!)'), or work on a clone")
    if shared:
        fixes.append("return a clone instead of the argument or a view of it")
    return "; ".join(fixes) or "make the schema say what the kernel does"


def _storage(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    return tensor.untyped_storage()._cdata


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.layout is not torch.strided:
        return True
    return (
        left.shape == right.shape
        and torch.equal(torch.isnan(left), torch.isnan(right))
        and bool(((left == right) | torch.isnan(left)).all())
    )
