"""Compare values and gradients under AOTAutograd with eager, with static and with dynamic sizes."""

from __future__ import annotations

from typing import Any

from fake.error_text import error_text
from fake.library.opcheck.result import Fault
from fake.library.opcheck.sample_calls import Call, attempt
from fake.seam import library as _torch


def check(op: Any, call: Call, *, dynamic: bool) -> str:
    """Compare AOTAutograd with eager.

    Args:
        op: the overload to check.
        call: the sample.
        dynamic: trace with symbolic sizes instead of constants.

    Raises:
        Fault: the two disagree, or tracing fails.
    """
    try:
        _torch.optest("safe_aot_autograd_check")(
            op, call.args, call.kwargs, dynamic=dynamic, **call.tolerances
        )
    except Exception as error:
        raise Fault(error_text(error), fix=_fix(op, call, error_text(error))) from error
    return ""


def _fix(op: Any, call: Call, said: str) -> str:
    if attempt(op, call).error is not None:
        return "give a sample that the operator accepts: it raised this error outside of the compiler, too"
    if "Outputs of the operator are different" in said:
        return "the kernel must compute its outputs from its arguments only: no counters, caches or other global state"
    if "Gradients of the operator are different" in said:
        return (
            "the backward formula must be made of traceable torch operations on what ctx saved: put other work (numpy, "
            ".item(), memory tricks) into another custom operator"
        )
    if "alias annotations" in said:
        return "return a clone and drop the annotation of the output, or register the operator as CompositeImplicitAutograd: only ATen's views can be functionalized"
    return (
        "the operator runs, but cannot be traced: it needs a fake kernel that is exact (see test_faketensor), and "
        "setup_context and the backward formula that do not read data"
    )
