"""Compare the schema with what the kernel does: mutation, aliasing."""

from __future__ import annotations

from typing import Any

from fake.error_text import error_text
from fake.library.opcheck.call_memory import compare_memory
from fake.library.opcheck.result import Fault
from fake.library.opcheck.sample_calls import Call
from fake.seam import library as _torch


def check(op: Any, call: Call) -> str:
    """Compare what the kernel did to its arguments with the schema; then run torch's SchemaCheckMode.

    Raises:
        Fault: an argument is mutated or shares memory with an output, or two outputs share memory, and the
            schema does not say so; or the kernel refuses the sample.
    """
    found = compare_memory(op, call.detached())
    try:
        _torch.optest("safe_schema_check")(op, call.copy().args, call.copy().kwargs)
    except Exception as error:
        if found is None:
            fix = "give a sample that the operator accepts: the kernel raised this error"
            raise Fault(error_text(error), fix=fix) from error
        fix = found.fix or "make the schema say what the kernel does"
        raise Fault(error_text(error), evidence=found.evidence, fix=fix) from error
    if found is not None and found.text:
        raise Fault(found.text, evidence=found.evidence, fix=found.fix)
    return ""
