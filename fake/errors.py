"""Errors of the fake-tensor engine. Those that torch's own code raises are torch's classes, named here."""

from __future__ import annotations

from typing import Any

from ._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    MetadataMismatchError,
    UnsupportedFakeTensorException,
    UnsupportedMutationAliasingException,
    UnsupportedOperatorException,
    render_call,
)

__all__ = [
    "AccelerateError",
    "CacheCrossCheckError",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FallbackNotAllowedError",
    "MetadataMismatchError",
    "MixedFakeModesError",
    "NonFakeInputError",
    "UnsupportedFakeTensorException",
    "UnsupportedMutationAliasingException",
    "UnsupportedOperatorException",
    "UnsupportedTorchVersionError",
]


class FallbackNotAllowedError(UnsupportedOperatorException):
    """Only its real kernel, run on zeros, could answer for an operator, and the mode does not allow that.

    Attributes:
        func: the operator.
    """

    def __init__(self, func: Any) -> None:
        super().__init__(func)
        self.args = (
            f"{func} has no meta kernel, fake kernel or decomposition for these arguments. Register one with "
            "torch.library.register_fake, or let its real kernel run on zeros: FakeTensorMode(allow_fallback_kernels=True).",
        )


class NonFakeInputError(AssertionError):
    """An operator in the mode was given a tensor that holds data.

    Attributes:
        func: the operator.
        tensor: the tensor that is not fake.
    """

    def __init__(self, func: object, args: object, kwargs: object, tensor: object) -> None:
        self.func = func
        self.tensor = tensor
        super().__init__(
            "Please convert all Tensors to FakeTensors first (mode.from_tensor) or instantiate FakeTensorMode "
            f"with 'allow_non_fake_inputs'. Found in {render_call(func, args, kwargs)}"
        )


class MixedFakeModesError(AssertionError):
    """A fake tensor of one mode was given to an operator that runs in another mode.

    Attributes:
        func: the operator.
        expected: the mode that runs the operator.
        actual: the mode that owns the tensor.
    """

    def __init__(self, func: object, expected: object, actual: object) -> None:
        self.func, self.expected, self.actual = func, expected, actual
        super().__init__(
            f"Mixing fake modes NYI: {func} runs in {expected} and was given a tensor of {actual}. "
            "Convert it with mode.from_tensor, or make both tensors in one mode."
        )


class CacheCrossCheckError(RuntimeError):
    """A result served from the dispatch cache differs from a fresh dispatch (cross-check mode).

    Attributes:
        func: the operator.
        detail: the first difference.
    """

    def __init__(self, func: object, detail: str) -> None:
        self.func, self.detail = func, detail
        super().__init__(
            f"FakeTensor cache crosscheck failure: func={func}: {detail}. "
            "Run with cache_enabled=False on the mode, and report the operator and its inputs."
        )


class UnsupportedTorchVersionError(RuntimeError):
    """``accelerate()`` does not know this release of torch.

    Attributes:
        found: the installed version.
        supported: the (major, minor) pairs that are known.
    """

    def __init__(self, found: str, supported: tuple[tuple[int, int], ...]) -> None:
        self.found, self.supported = found, supported
        names = ", ".join(f"{major}.{minor}" for major, minor in supported)
        super().__init__(
            f"fake.accelerate() knows torch {names} and found {found}: it replaces private functions of torch and "
            "refuses to guess. Install one of those releases, or compile without accelerate()."
        )


class AccelerateError(RuntimeError):
    """``accelerate()`` could not be turned on or off, because another tool patched the same functions."""
