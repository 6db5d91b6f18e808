"""Check that autograd is registered where the dispatcher looks for it."""

from __future__ import annotations

from typing import Any

from fake.error_text import error_text
from fake.library.opcheck.result import Fault
from fake.library.opcheck.sample_calls import Call
from fake.seam import library as _torch


def check(op: Any, call: Call) -> str:
    """If inputs require a gradient, check that outputs get theirs from a kernel behind an Autograd key.

    Raises:
        Fault: the operator has no such kernel, or hides its autograd below the dispatcher's.
    """
    try:
        _torch.optest("safe_autograd_registration_check")(op, call.copy().args, call.copy().kwargs)
    except Exception as error:
        raise Fault(
            error_text(error),
            fix="register the formula with register_autograd; do not call autograd.Function inside a device kernel",
        ) from error
    return ""
