"""This backend's name in Hugging Face's ``accelerate``, and so in ``transformers.TrainingArguments``."""

from __future__ import annotations

import importlib

__all__ = ["register_backend"]

_NAME = "FXPASSES"  # accelerate looks names up in upper case, and gives torch.compile the lower-case name


def register_backend() -> None:
    """Let ``accelerate`` and ``transformers`` find this backend by name.

    Then ``TrainingArguments(torch_compile_backend="fxpasses")`` and
    ``Accelerator(dynamo_backend="fxpasses")`` work. ``accelerate`` accepts only members of its enumeration
    ``DynamoBackend``. This sets its ``_missing_``, which Python's ``enum`` calls for values that are not
    members. Other unknown names stay errors.

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
