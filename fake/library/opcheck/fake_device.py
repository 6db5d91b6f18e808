"""Find fake kernels that answer for one device only, of operators that have one kernel for all devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fake.library.opcheck.comparison import run_fake
from fake.library.opcheck.result import Evidence, Fault
from fake.library.opcheck.sample_calls import Call, attempt, flat_tensors
from fake.seam import library as _torch


def check(op: Any, call: Call) -> str:
    """If the Python kernel for all devices runs on meta tensors and stays on meta, the fake kernel must, too.

    Raises:
        Fault: the fake kernel's outputs are on another device.
    """
    kernel = _torch.kernel_for_all_devices(op)
    if kernel is None or not call.tensors:
        return "no Python kernel for all devices"
    if any(t.device.type != "cpu" or t.layout is not torch.strided for t in call.tensors):
        return "not tried: an input is on another device than the CPU"
    on_meta = call.map(lambda t: t.detach().to("meta"))
    with _torch.BelowAutograd():
        real = _run(lambda: kernel(*on_meta.args, **on_meta.kwargs))
    fake = _run(lambda: run_fake(op, on_meta).value)
    if real is None or fake is None or any(not t.is_meta for t in flat_tensors(real)):
        return "the kernel needs data"
    for index, output in enumerate(flat_tensors(fake)):
        if output.device.type != "meta":
            raise Fault(
                f"the fake kernel puts output {index} on {output.device}, wherever the inputs are",
                evidence=(
                    Evidence(f"output {index}", "the inputs' device, as the kernel", str(output.device)),
                ),
                fix="make the outputs on the inputs' device: x.new_empty(...), or device=x.device",
            )
    return ""


def _run(function: Callable[[], Any]) -> Any:
    """Return the result, or None if the call fails. Meta tensors have no data to copy."""
    return attempt(lambda: function(), Call((), {})).value
