"""Values and gradients under AOTAutograd against eager, with static and with dynamic sizes."""

from __future__ import annotations

from typing import Any

from fake.error_text import error_text
from fake.library import _torch
from fake.library.opcheck.inputs import Call, attempt
from fake.library.opcheck.result import CheckFailure

STATIC = "test_aot_dispatch_static"
DYNAMIC = "test_aot_dispatch_dynamic"


def _check(name: str, op: Any, call: Call, *, dynamic: bool) -> str:
    try:
        _torch.torch_aot_check(op, call.args, call.kwargs, dynamic=dynamic, **call.tolerances)
    except Exception as error:
        raise CheckFailure(
            name, _torch.op_overload_name(op), error_text(error), fix=_fix(op, call, error_text(error))
        ) from error
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


def check_static(op: Any, call: Call) -> str:
    """Compare AOTAutograd with eager, with sizes as constants; a CheckFailure says where they disagree or tracing fails."""
    return _check(STATIC, op, call, dynamic=False)


def check_dynamic(op: Any, call: Call) -> str:
    """Compare AOTAutograd with eager, with symbolic sizes; a CheckFailure says where they disagree or tracing fails."""
    return _check(DYNAMIC, op, call, dynamic=True)
