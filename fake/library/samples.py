"""What the commands are given: an operator by name, and sample calls from a file."""

from __future__ import annotations

import importlib
import runpy
from pathlib import Path
from typing import Any

import torch

from fake.library.errors import UnknownOpError

__all__ = ["find_operator", "read_samples"]


def find_operator(spec: str) -> Any:
    """The operator that ``module:attribute`` or ``namespace::name`` (``namespace::name.overload``) stands for.

    Raises:
        UnknownOpError: it names nothing.

    >>> find_operator("aten::sin")
    <OpOverload(op='aten.sin', overload='default')>
    """
    if "::" in spec:
        namespace, name = spec.split("::", 1)
        packet, _, overload = name.partition(".")
        try:
            return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        except AttributeError as error:
            raise UnknownOpError(
                f"there is no operator {spec}; import what defines it in the samples file"
            ) from error
    module_name, _, attribute = spec.partition(":")
    if not attribute:
        raise UnknownOpError(f"{spec!r}: expected module:operator or namespace::name")
    target: Any = importlib.import_module(module_name)
    try:
        for part in attribute.split("."):
            target = getattr(target, part)
    except AttributeError as error:
        raise UnknownOpError(f"module {module_name} has no {attribute}") from error
    return target


def read_samples(path: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The sample calls of a Python file: its ``samples``, a list (or a function that returns one) of argument tuples
    or ``(args, kwargs)`` pairs.

    Raises:
        ValueError: the file has no ``samples``.
    """
    content = runpy.run_path(str(Path(path)))
    if "samples" not in content:
        raise ValueError(f"{path} must define `samples`, a list of argument tuples or (args, kwargs) pairs")
    found = content["samples"]() if callable(content["samples"]) else content["samples"]
    calls = []
    for sample in found:
        if len(sample) == 2 and isinstance(sample[0], (tuple, list)) and isinstance(sample[1], dict):
            calls.append((tuple(sample[0]), dict(sample[1])))
        else:
            calls.append((tuple(sample), {}))
    return calls
