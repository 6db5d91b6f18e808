"""This backend's name in Hugging Face's ``accelerate``, and so in ``transformers.TrainingArguments``."""

from __future__ import annotations

import importlib

__all__ = ["register_backend"]

_NAME = "FXPASSES"  # accelerate looks names up in capitals, and hands them to torch.compile in small letters


def register_backend() -> None:
    """Let ``TrainingArguments(torch_compile_backend="fxpasses")`` and ``Accelerator(dynamo_backend="fxpasses")`` name this backend.

    ``accelerate`` takes the members of its enumeration ``DynamoBackend`` only. This gives that what Python's ``enum`` asks about values
    that are no members, ``_missing_``; other unknown names stay errors.

    Raises:
        ImportError: ``accelerate`` is not installed.
    """
    backends = importlib.import_module("accelerate.utils").DynamoBackend
    before = backends._missing_
    member = str.__new__(backends, _NAME)
    member._name_ = member._value_ = _NAME

    def missing(cls: type, value: object) -> object:
        return member if value == _NAME else before(value)

    backends._missing_ = classmethod(missing)
