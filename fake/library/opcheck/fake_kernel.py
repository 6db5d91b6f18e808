"""Compare the fake kernel with the real one on the sample."""

from __future__ import annotations

from typing import Any

from fake.error_text import error_text
from fake.library.opcheck.comparison import compare, fix_for, run_real, try_fake
from fake.library.opcheck.result import Evidence, Fault
from fake.library.opcheck.sample_calls import Call, flat_tensors
from fake.seam import library as _torch


def check(op: Any, call: Call) -> str:
    """Compare sizes, strides, dtypes, devices and the output count; then run torch's cross-reference mode.

    Raises:
        Fault: there is no fake kernel, it fails, or its answer differs from the real result.
    """
    evidence: tuple[Evidence, ...] = ()
    real = run_real(op, call.detached())
    fake = try_fake(op, call.detached())
    if real.error is None and fake.error is None:
        evidence = tuple(compare(call, real.value, fake.value))
    try:
        _torch.optest("safe_fake_check")(op, call.copy().args, call.copy().kwargs)
    except Exception as error:
        raise Fault(
            error_text(error), evidence=evidence, fix=_fix(real.error, fake.error, evidence, call)
        ) from error
    if evidence:
        problem = f"the fake kernel is wrong about {evidence[0].where}"
        raise Fault(problem, evidence=evidence, fix=fix_for(evidence[0], call))
    return "" if flat_tensors(real.value.value) else "no tensor outputs"


def _fix(real: Exception | None, fake: Exception | None, evidence: tuple[Evidence, ...], call: Call) -> str:
    if real is not None:
        return "give a sample that the operator accepts: the real kernel raised this error"
    if isinstance(fake, _torch.MISSING_FAKE_KERNEL_ERRORS) or (fake and "no fake impl" in error_text(fake)):
        return "register a fake kernel with register_fake; probe() can derive it"
    if isinstance(fake, _torch.DATA_READ_ERRORS):
        return (
            "a fake kernel must not read values (item(), tolist(), numpy(), a tensor in an if): sizes that depend on "
            "them are get_ctx().new_dynamic_size()"
        )
    if evidence:
        return fix_for(evidence[0], call)
    if fake is not None:
        return f"correct the fake kernel, which raised {type(fake).__name__} for the sample; probe() can derive one"
    return (
        "make the fake kernel, and what runs under the operator's autograd, return what the real one returns"
    )
