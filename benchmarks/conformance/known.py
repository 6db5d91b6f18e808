"""What no rule can make right, and why: expected findings of a sweep, named by operator. Static sizes have none."""

from __future__ import annotations

from benchmarks.conformance.report import Case

__all__ = ["KNOWN_SYMBOLIC", "is_known"]

_DISPATCHER = (
    "the Python dispatcher decomposes constant_pad_nd or view_as_real above autograd, so gradients differ"
)

#: Operator (with its database) to the reason: strides of gradients, with symbolic sizes only.
KNOWN_SYMBOLIC: dict[str, str] = {
    "op:fft.fft": _DISPATCHER,
    "op:fft.ifft": _DISPATCHER,
    "op:fft.ihfft": _DISPATCHER,
    "op:fft.rfft": _DISPATCHER,
    "op:istft": _DISPATCHER,
}


def is_known(case: Case) -> bool:
    """Whether a finding is a known one: the strides of a gradient with symbolic sizes."""
    name = case.label.split()[0]
    if not case.symbolic or not case.table.startswith("backward"):
        return False
    return name in KNOWN_SYMBOLIC and ": stride " in case.outcome.detail
