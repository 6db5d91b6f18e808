"""Errors and warnings of `fake.library`: each names the operator and the argument, and says what to do.

The classes also derive from the built-in type that ``torch.library`` raises in the same place, so code that
catches ``ValueError`` or ``RuntimeError`` around torch's functions works unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "DuplicateOpError",
    "FakeKernelError",
    "KernelReturnError",
    "LibraryError",
    "LibraryWarning",
    "MissingContextError",
    "OpCheckError",
    "OpDestroyedError",
    "OpReplacedWarning",
    "OutputAliasError",
    "ProbeError",
    "ProfileError",
    "RegistrationError",
    "ReservedNamespaceError",
    "SchemaError",
    "SignatureError",
    "SignatureWarning",
    "UnknownOpError",
    "UnsupportedAnnotationError",
]


class LibraryError(Exception):
    """Base of all errors raised by `fake.library`.

    Attributes:
        op: the operator's qualified name, or None if it has none yet.
        argument: the offending argument, or None.
    """

    def __init__(self, message: str, *, op: str | None = None, argument: str | None = None) -> None:
        super().__init__(message)
        self.op = op
        self.argument = argument


class RegistrationError(LibraryError, RuntimeError):
    """A registration for this operator is not possible."""


class SchemaError(LibraryError, ValueError):
    """A schema, or an argument that it is derived from, is invalid."""


class ReservedNamespaceError(SchemaError):
    """The namespace belongs to torch."""

    def __init__(self, namespace: str) -> None:
        super().__init__(
            f"{namespace!r} is a reserved namespace. Use the name of your project as the namespace of its operators."
        )
        self.namespace = namespace


class DuplicateOpError(RegistrationError):
    """An operator of that name already exists and was not made here, so it cannot be replaced."""


class UnsupportedAnnotationError(SchemaError):
    """A parameter or return annotation has no schema type.

    Attributes:
        annotation: the annotation as written.
        supported: the annotations that are supported.
    """

    def __init__(
        self,
        message: str,
        *,
        op: str | None,
        argument: str | None,
        annotation: object,
        supported: Iterable[str] = (),
    ) -> None:
        super().__init__(message, op=op, argument=argument)
        self.annotation = annotation
        self.supported = tuple(supported)


class SignatureError(LibraryError, ValueError):
    """A registered function cannot be called the way the schema says.

    Attributes:
        role: what the function was registered as, for example ``"fake kernel"``.
        expected: the signature that the schema requires.
        actual: the function's signature.
    """

    def __init__(
        self, op: str, role: str, problem: str, *, expected: str, actual: str, argument: str | None = None
    ) -> None:
        super().__init__(
            f"{op}: the {role} does not fit the operator: {problem}\n"
            f"  expected: {expected}\n"
            f"  got:      {actual}\n"
            f"Change the {role} so that its signature is the expected one.",
            op=op,
            argument=argument,
        )
        self.role = role
        self.expected = expected
        self.actual = actual


class FakeKernelError(LibraryError, RuntimeError):
    """A fake kernel returned something that the operator cannot return."""


class KernelReturnError(LibraryError, RuntimeError):
    """A kernel returned something that the schema's return types do not allow."""


class OutputAliasError(LibraryError, RuntimeError):
    """An output of a custom operator shares memory with an input or another output."""


class OpDestroyedError(LibraryError, RuntimeError):
    """The operator was destroyed or replaced; this object cannot be called any more."""


class UnknownOpError(LibraryError, ValueError):
    """The argument does not name an operator."""


class MissingContextError(LibraryError, RuntimeError):
    """`get_ctx` was called outside of a fake kernel."""


class ProfileError(LibraryError, RuntimeError):
    """An operator profile cannot be read, or none matches a call."""


class OpCheckError(LibraryError, RuntimeError):
    """`opcheck` found a defect, or cannot do what was asked."""


class ProbeError(LibraryError, RuntimeError):
    """`probe` cannot run the operator on the given samples."""


class LibraryWarning(UserWarning):
    """Base of all warnings of `fake.library`."""


class OpReplacedWarning(LibraryWarning):
    """An operator, or part of one, was registered again, and the earlier registration is gone."""


class SignatureWarning(LibraryWarning):
    """A function can be called, but its parameter names differ from the schema's."""
