"""Compare the fake kernel's answer for a call with the real result, and say how to fix a difference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fake.library.opcheck.result import Evidence, describe_tensor
from fake.library.opcheck.sample_calls import Call, Outcome, attempt, flat_tensors
from fake.seam import library as _torch

#: Aspect that differs → advice, unless the way the call was varied allows better advice.
_FIX_BY_ASPECT = {
    "dtype": "give the output the dtype that the kernel gives it: take it from the inputs (x.new_empty, "
    "dtype=x.dtype) or from what the kernel converts to, not a constant",
    "device": "make the outputs on the inputs' device: x.new_empty(...), or device=x.device",
    "strides": "use empty_like (keeps strides) where the kernel keeps them, new_empty (contiguous) where it does "
    "not, empty_strided where it does something else",
    "layout": "return tensors of the layout that the kernel returns",
    "number": "return as many outputs as the kernel does for such arguments",
    "kind": "return the same kinds of values as the kernel: tensors for tensors, numbers for numbers",
    "value": "compute the number from the inputs' sizes as the kernel does; one that depends on data is a new_dynamic_size()",
    "range": "give new_dynamic_size() the min and max between which the size really lies (by default 0 and none)",
    "equal": "make one new_dynamic_size() for each size that can differ",
    "alias": "return a new tensor, empty_like(x): the kernel's output is not the input",
}
_FIX_BY_KIND = {
    "value": "the size depends on data: use get_ctx().new_dynamic_size() for it",
    "broadcast": "compute the size with torch.broadcast_shapes, or have the kernel refuse sizes that differ",
    "list": "compute the size from all tensors of the list, however many there are",
}


@dataclass(frozen=True)
class KernelResult:
    """The result of a kernel, real or fake, and which outputs share an argument's memory."""

    value: Any
    in_arguments: tuple[int, ...]


def run_fake(op: Any, call: Call) -> KernelResult:
    """Return the fake kernel's answer. Data-dependent sizes are unbacked symbols."""
    shape_env = _torch.ShapeEnv()
    with _torch.FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=False) as mode:
        fake_call = call.map(lambda t: mode.from_tensor(t, static_shapes=True))
        memory = {_torch.storage_of(t) for t in fake_call.tensors} - {None}
        with torch.no_grad():
            return _kernel_result(op(*fake_call.args, **fake_call.kwargs), memory)


def _kernel_result(value: Any, memory: set[int | None]) -> KernelResult:
    shared = [
        index
        for index, leaf in enumerate(_leaves(value))
        if isinstance(leaf, torch.Tensor) and _torch.storage_of(leaf) in memory
    ]
    return KernelResult(value, tuple(shared))


def try_fake(op: Any, call: Call) -> Outcome:
    """Return the outcome of `run_fake`."""
    return attempt(lambda *a, **k: run_fake(op, Call(a, k)), call)


def _leaves(value: Any) -> list[Any]:
    return [leaf for leaf in _torch.pytree.tree_leaves(value) if leaf is not None]


def run_real(op: Any, call: Call) -> Outcome:
    """Return the outcome of the real kernel: its value, and the outputs that share an argument's memory."""

    def run(*args: Any, **kwargs: Any) -> KernelResult:
        memory = {_torch.storage_of(t) for t in flat_tensors((args, kwargs))} - {None}
        return _kernel_result(op(*args, **kwargs), memory)

    return attempt(run, call)


def compare(call: Call, real: KernelResult, fake: KernelResult) -> list[Evidence]:
    """Return every difference between the real outputs of ``call`` and the fake kernel's answer.

    Args:
        call: the arguments of both kernels.
        real: the real kernel's result.
        fake: the fake kernel's result.
    """
    inputs = call.describe() if not call.kind else f"{call.label}: {call.describe()}"
    real_leaves, fake_leaves = _leaves(real.value), _leaves(fake.value)
    if len(real_leaves) != len(fake_leaves):
        counts = f"{len(real_leaves)} of them", f"{len(fake_leaves)} of them"
        return [Evidence("outputs", *counts, inputs, "number")]
    found: list[Evidence] = []
    sizes: dict[Any, int] = {}
    # Rows that share memory have no order in memory: kernels of other libraries choose either.
    ordered = not any(0 in _strides_of(t) for t in call.tensors)
    for index, (mine, theirs) in enumerate(zip(real_leaves, fake_leaves, strict=True)):
        where = f"output {index}"
        if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
            found += _compare_numbers(where, mine, theirs, inputs)
            continue
        aspect = _wrong_aspect(mine, theirs)
        if aspect is not None and (ordered or aspect != "strides"):
            found.append(Evidence(where, describe_tensor(mine), _describe(theirs), inputs, aspect))
        else:
            found += _compare_symbols(where, mine, theirs, sizes, inputs)
        if index in fake.in_arguments and index not in real.in_arguments:
            found.append(Evidence(where, "memory of its own", "the memory of an argument", inputs, "alias"))
    return found


def _wrong_aspect(mine: torch.Tensor, theirs: torch.Tensor) -> str | None:
    """Return the aspect in which a fake tensor is wrong, or None."""
    if mine.dtype != theirs.dtype:
        return "dtype"
    if mine.device != theirs.device:
        return "device"
    if mine.dim() != theirs.dim() or any(
        not _is_symbolic(b) and a != b for a, b in zip(mine.shape, theirs.shape, strict=True)
    ):
        return "sizes"
    if mine.layout != theirs.layout:
        return "layout"
    if mine.layout is not torch.strided or not mine.numel() or any(_is_symbolic(s) for s in theirs.shape):
        return None
    strides = zip(mine.shape, mine.stride(), theirs.stride(), strict=True)
    return "strides" if any(size > 1 and a != b for size, a, b in strides) else None


def _compare_numbers(where: str, mine: Any, theirs: Any, inputs: str) -> list[Evidence]:
    if isinstance(mine, torch.Tensor) != isinstance(theirs, torch.Tensor):
        return [Evidence(where, type(mine).__name__, type(theirs).__name__, inputs, "kind")]
    known = type(theirs) in (int, float, bool) and type(mine) in (int, float, bool)
    return [Evidence(where, repr(mine), repr(theirs), inputs, "value")] if known and mine != theirs else []


def _compare_symbols(
    where: str, mine: torch.Tensor, theirs: torch.Tensor, sizes: dict[Any, int], inputs: str
) -> list[Evidence]:
    """Check sizes that the fake kernel left open: real ones are in range, and equal for equal symbols."""
    found = []
    symbols: tuple[Any, ...] = tuple(theirs.shape)
    for dim, (real, symbol) in enumerate(zip(mine.shape, symbols, strict=True)):
        if not _is_symbolic(symbol):
            continue
        place = f"{where}, size {dim}"
        low, high = _torch.range_of_size(symbol)
        if not low <= real <= high:
            found.append(Evidence(place, str(real), f"a size from {low} to {high}", inputs, "range"))
        known = sizes.setdefault(_torch.expression_of_size(symbol), real)
        if known != real:
            found.append(Evidence(place, str(real), f"the same size as another, {known}", inputs, "equal"))
    return found


def fix_for(evidence: Evidence, call: Call) -> str:
    """Return the advice for a difference that ``call`` showed."""
    if evidence.aspect == "error":
        return (
            "the fake kernel must accept what the kernel accepts; where such inputs make no sense, have the kernel "
            "raise an error, too"
        )
    if evidence.aspect == "sizes":
        if call.kind == "number":
            return f"compute the output's sizes from {call.label.split(' = ')[0]!r} as the kernel does"
        return _FIX_BY_KIND.get(
            call.kind,
            "compute the output's sizes from the inputs' sizes as the kernel does; sizes that depend on data need "
            "new_dynamic_size()",
        )
    return _FIX_BY_ASPECT[evidence.aspect]


def _strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    if tensor.layout is not torch.strided:
        return ()
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, torch.SymInt)


def _describe(tensor: torch.Tensor) -> str:
    if any(_is_symbolic(s) for s in (*tensor.shape, *tensor.stride())):
        sizes = ", ".join("?" if _is_symbolic(s) else str(s) for s in tensor.shape)
        return f"{str(tensor.dtype).removeprefix('torch.')}[{sizes}] {tensor.device}"
    return describe_tensor(tensor)
