"""Expected findings that no rule can fix, by operator, with reasons. Static sizes have none."""

from __future__ import annotations

import torch

from benchmarks.conformance.report import Case

__all__ = ["KNOWN_BEFORE_2_13", "KNOWN_COPIES", "KNOWN_ON_CUDA", "KNOWN_SYMBOLIC", "is_known"]

_DISPATCHER = (
    "the Python dispatcher decomposes constant_pad_nd or view_as_real above autograd, so gradients differ"
)

#: Operators (with database) whose gradients have other strides with symbolic sizes only, with reasons.
KNOWN_SYMBOLIC: dict[str, str] = {
    "op:fft.fft": _DISPATCHER,
    "op:fft.ifft": _DISPATCHER,
    "op:fft.ihfft": _DISPATCHER,
    "op:fft.rfft": _DISPATCHER,
    "op:istft": _DISPATCHER,
}


#: Operators that return their argument in eager, but a copy where the Python dispatcher decomposes them.
KNOWN_COPIES: dict[str, str] = {"op:nn.functional.dropout": "with nothing to drop, its decomposition copies"}

_UNFLATTENED = (
    "parameters of fake layers are not moved into one buffer, as cuDNN's are: there is no memory to move"
)

#: Known findings on GPU, also with static sizes. None of these differs on CPU.
KNOWN_ON_CUDA: dict[str, str] = {
    "op:torch.ops.aten._efficient_attention_forward": "without dropout the seed is on the CPU, but on the GPU while a CUDA graph is captured",
    "module:nn.LSTM": _UNFLATTENED,
    "module:nn.GRU": _UNFLATTENED,
    "module:nn.RNN": _UNFLATTENED,
}

_IS_OLD = torch.__version__.startswith(("2.11", "2.12"))
_OLD = "torch's own functions were others: fft on a GPU, the rest on a CPU as well"

#: Known findings with torch older than 2.13, on any device.
KNOWN_BEFORE_2_13: dict[str, str] = dict.fromkeys(
    (
        *(f"op:{name}_scatter" for name in ("diagonal", "select", "slice")),
        *(f"op:fft.{i}{kind}fft{n}" for i in ("", "i") for kind in ("", "h", "r") for n in ("2", "n")),
        *(f"op:{name}" for name in ("combinations", "quantile", "nanquantile")),
    ),
    _OLD,
)


def is_known(case: Case, device: str = "cpu") -> bool:
    """Return whether a finding is expected for its operator, sizes, device and release of torch."""
    name = case.label.split()[0]
    if (device == "cuda" and name in KNOWN_ON_CUDA) or (_IS_OLD and name in KNOWN_BEFORE_2_13):
        return True
    if case.symbolic and name in KNOWN_COPIES:
        return "shares" in case.outcome.detail
    if not case.symbolic or not case.table.startswith("backward"):
        return False
    return name in KNOWN_SYMBOLIC and ": stride " in case.outcome.detail
