"""What no rule can make right, and why: expected findings of a sweep, named by operator."""

from __future__ import annotations

from fake.conformance.report import Case

__all__ = ["KNOWN", "KNOWN_SYMBOLIC", "is_known"]

_AUTOGRAD = (
    "autograd's C++ formula takes another path for any tensor subclass (isTensorSubclassLike in "
    "FunctionsManual.cpp), and the two paths differ in strides for inputs that are not row-major"
)

#: Operator (with its database) to the reason. Only gradients' strides, and only where said.
KNOWN: dict[str, str] = {
    "op:linalg.householder_product": _AUTOGRAD,
    "op:masked.prod": _AUTOGRAD,
    "op:max.reduction_no_dim": _AUTOGRAD,
    "op:median": _AUTOGRAD,
    "op:min.reduction_no_dim": _AUTOGRAD,
    "op:nanmedian": _AUTOGRAD,
    "op:nn.functional.one_hot": "a C++ composite that compares broadcast tensors for any tensor subclass",
    "op:ormqr": _AUTOGRAD,
    "op:prod": _AUTOGRAD,
}


_DISPATCHER = (
    "the Python dispatcher decomposes constant_pad_nd or view_as_real above autograd, so gradients differ"
)

#: The same, for runs with symbolic sizes only.
KNOWN_SYMBOLIC: dict[str, str] = {
    "op:fft.fft": _DISPATCHER,
    "op:fft.ifft": _DISPATCHER,
    "op:fft.ihfft": _DISPATCHER,
    "op:fft.rfft": _DISPATCHER,
    "op:istft": _DISPATCHER,
}


def is_known(case: Case) -> bool:
    """Whether a finding is a known one: strides of gradients, or of ``one_hot``."""
    name = case.label.split()[0]
    if ": stride " not in case.outcome.detail or name not in {
        **KNOWN,
        **(KNOWN_SYMBOLIC if case.symbolic else {}),
    }:
        return False
    return case.table.startswith("backward") or name == "op:nn.functional.one_hot"
