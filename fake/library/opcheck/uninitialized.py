"""Find outputs that depend on uninitialized memory."""

from __future__ import annotations

from typing import Any

import torch

from fake.library.opcheck.call_memory import same_bits
from fake.library.opcheck.free_sizes import plan_sizes
from fake.library.opcheck.result import Evidence, Fault
from fake.library.opcheck.sample_calls import Call, attempt, flat_tensors
from fake.seam import library as _torch
from fake.seam.dispatch import TorchDispatchMode

_ALLOCATORS = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
)


class _FillEmpty(TorchDispatchMode):
    """Fills what ``empty`` and related functions return with a pattern."""

    def __init__(self, pattern: float) -> None:
        super().__init__()
        self.pattern = pattern
        self.filled = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            func.overloadpacket in _ALLOCATORS
            and isinstance(result, torch.Tensor)
            and result.device.type != "meta"
        ):
            self.filled += 1
            if result.dtype is torch.bool:
                result.fill_(bool(self.pattern > 0))
            elif result.dtype.is_floating_point or result.dtype.is_complex:
                result.fill_(self.pattern)
            else:
                result.fill_(int(abs(self.pattern)))
        return result


def check(op: Any, call: Call) -> str:
    """Run the kernel with two patterns in new memory, also for other sizes: outputs must be the same.

    It sees memory that the kernel allocates through torch from Python (``torch.empty``), not in C++.

    Raises:
        Fault: an output depends on the pattern.
    """
    if "empty" in _torch.op_overload_name(op):
        return "an allocator itself"
    call = call.detached()
    key = _torch.backend_key_of(call.args, call.kwargs)
    if key is None or not _torch.has_computed_kernel_for_key(_torch.op_overload_name(op), key):
        return "no kernel of its own for the device"
    note = _check_call(op, key, call)
    if note or not _torch.is_defined_in_python(op):
        return note
    plan = plan_sizes(op, call)
    for other in plan.all_different():
        _check_call(op, key, other)
    for group in plan.groups:
        # A partial block, one element, and more than one block.
        for new in (group.size + 1, group.size + 2, group.size + 3, 1, group.size - 1, 33):
            for other in plan.at(group, new) if new > 0 else ():
                _check_call(op, key, other)
    return ""


def _check_call(op: Any, key: str, call: Call) -> str:
    def run(pattern: float) -> tuple[list[torch.Tensor], int] | None:
        mode = _FillEmpty(pattern)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with mode:
                return _torch.call_at_key(op, key, args, kwargs), args, kwargs

        outcome = attempt(kernel, call)
        if outcome.error is not None:
            return None
        return flat_tensors(outcome.value), mode.filled

    first, again, other = run(1.25), run(1.25), run(-3.5)
    if first is None or again is None or other is None or not first[1]:
        return "allocates nothing through torch"
    if any(not same_bits(a, b) for a, b in zip(first[0], again[0], strict=True)):
        return "not deterministic"
    with_ = "" if call.label == "the sample" else f" with {call.label}"
    wrong = tuple(
        Evidence(
            f"output {index}",
            "the same values whatever was in fresh memory",
            f"{int((a != b).sum())} of {a.numel()} elements differ",
            call.describe(),
        )
        for index, (a, b) in enumerate(zip(first[0], other[0], strict=True))
        if not same_bits(a, b)
    )
    if wrong:
        raise Fault(
            f"{wrong[0].where} depends on uninitialised memory{with_}",
            evidence=wrong,
            fix="write every element of the output, or allocate it with zeros instead of empty",
        )
    return ""
