"""Values and gradients under AOTAutograd against eager, with static and with dynamic sizes."""

from __future__ import annotations

from typing import Any

from fake.library import _torch
from fake.library.opcheck.inputs import Call
from fake.library.opcheck.result import CheckFailure

__all__ = ["DYNAMIC", "STATIC", "check_dynamic", "check_static"]

STATIC = "test_aot_dispatch_static"
DYNAMIC = "test_aot_dispatch_dynamic"


def _check(name: str, op: Any, call: Call, tolerances: dict[str, float], *, dynamic: bool) -> str:
    try:
        _torch.torch_aot_check(op, call.args, call.kwargs, dynamic=dynamic, **tolerances)
    except Exception as error:
        raise CheckFailure(
            name,
            _torch.op_overload_name(op),
            str(error),
            fix="the operator must depend on its arguments only, its fake kernel must be exact, and setup_context and "
            "the backward formula must be traceable: put untraceable work into another custom operator",
        ) from error
    return ""


def check_static(op: Any, call: Call, tolerances: dict[str, float]) -> str:
    """Raises CheckFailure where the two disagree or tracing fails, with sizes as constants."""
    return _check(STATIC, op, call, tolerances, dynamic=False)


def check_dynamic(op: Any, call: Call, tolerances: dict[str, float]) -> str:
    """Raises CheckFailure where the two disagree or tracing fails, with symbolic sizes."""
    return _check(DYNAMIC, op, call, tolerances, dynamic=True)
