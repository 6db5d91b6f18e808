"""Errors of the fake-tensor engine, and torch's own error classes under the same names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fake.seam.dispatch import render_call
from fake.seam.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    MetadataMismatchError,
    UnsupportedFakeTensorException,
    UnsupportedMutationAliasingException,
    UnsupportedOperatorException,
)
from fake.seam.missing import MissingTorchNameError
from fake.seam.symbolic_shapes import ConstraintViolationError

__all__ = [
    "AccelerateError",
    "CacheCrossCheckError",
    "ContractError",
    "ContractInputError",
    "ContractViolationError",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FallbackNotAllowedError",
    "MetadataMismatchError",
    "MissingTorchNameError",
    "MixedFakeModesError",
    "NonFakeInputError",
    "ShapeEnvError",
    "UnsupportedFakeTensorException",
    "UnsupportedMutationAliasingException",
    "UnsupportedOperatorException",
    "UnsupportedTorchVersionError",
    "Violation",
]


class FallbackNotAllowedError(UnsupportedOperatorException):
    """Only running its real kernel on zeros could answer for an operator, and the mode does not allow that.

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
    """An operator in the mode received a tensor that holds data.

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
    """An operator that runs in one mode received a fake tensor of another mode.

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
    """A result served from the dispatch cache differs from a fresh dispatch (in cross-check mode).

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
    """``accelerate()`` or ``using_shape_env()`` does not support this release of torch.

    Attributes:
        asked: the call that was refused.
        found: the installed version.
        supported: the supported (major, minor) pairs.
    """

    def __init__(self, asked: str, found: str, supported: tuple[tuple[int, int], ...]) -> None:
        self.asked, self.found, self.supported = asked, found, supported
        names = ", ".join(f"{major}.{minor}" for major, minor in supported)
        super().__init__(
            f"{asked} knows torch {names} and found {found}: it replaces private functions of torch and "
            "refuses to guess. Install one of those releases, or compile without it."
        )


class AccelerateError(RuntimeError):
    """``accelerate()`` cannot be turned off: other code patched the same functions, or it is off already."""


class ShapeEnvError(TypeError):
    """There is no shape environment, or it is of a kind that cannot be adopted."""


class ContractError(ValueError):
    """A declaration about a size is invalid.

    Attributes:
        owner: what the declaration is for.
        field: the part that is invalid.
    """

    def __init__(self, owner: str, field: str, problem: str) -> None:
        self.owner, self.field = owner, field
        super().__init__(f"{owner}: {field} {problem}")


class ContractInputError(ValueError):
    """An example input violates its own contract.

    Attributes:
        dim: the contract.
        where: the size, such as ``x.size(0)``.
        size: its value.
    """

    def __init__(
        self, dim: Any, where: str, size: int, other: str = "", other_size: int | None = None
    ) -> None:
        self.dim, self.where, self.size = dim, where, size
        wanted = f"{other} (of the same Dim) is {other_size}" if other else f"the contract is {dim}"
        super().__init__(
            f"{where} is {size}, but {wanted}. Trace with inputs that keep to the contract, or change it."
        )


@dataclass(frozen=True)
class Violation:
    """One way in which a program supports fewer sizes than its contract allows.

    Attributes:
        dim: the contract.
        where: the size, such as ``x.size(0)``.
        forced: what the program forces, in the user's terms.
        chain: the questions asked, with operator and line, earliest first; together they force it.
    """

    dim: Any
    where: str
    forced: str
    chain: tuple[str, ...]

    def __str__(self) -> str:
        steps = "".join(f"\n      {number}. {step}" for number, step in enumerate(self.chain, 1))
        return f"{self.where} is declared {self.dim}, but the program forces {self.forced}:{steps or ' nobody recorded why'}"


class ContractViolationError(ConstraintViolationError):
    """A traced program does not support all sizes that a contract allows.

    Attributes:
        violations: the violations, each with its chain of reasons.
    """

    def __init__(self, violations: tuple[Violation, ...]) -> None:
        self.violations = violations
        told = "\n".join(f"  - {violation}" for violation in violations)
        super().__init__(
            f"{len(violations)} contract{'s are' if len(violations) > 1 else ' is'} not kept.\n{told}\n"
            "Change the lines named above, or declare what they need (a narrower range, multiple_of, the same Dim)."
        )
