"""What the commands are given: an operator by name, and sample calls from a file."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import runpy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from fake.library.errors import SamplesError, UnknownOpError

_EXPECTED = "a list of argument tuples or (args, kwargs) pairs, or a function that returns one"


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
    if not module_name or importlib.util.find_spec(module_name.partition(".")[0]) is None:
        raise UnknownOpError(f"there is no module {module_name!r}")
    target: Any = importlib.import_module(module_name)
    try:
        for part in attribute.split("."):
            target = getattr(target, part)
    except AttributeError as error:
        near = difflib.get_close_matches(attribute, vars(importlib.import_module(module_name)), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UnknownOpError(f"module {module_name} has no {attribute}{hint}") from error
    return target


def read_samples(path: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The sample calls of a Python file: its ``samples``, a list (or a function that returns one) of argument tuples
    or ``(args, kwargs)`` pairs.

    Raises:
        SamplesError: there is no such file, it has no ``samples``, or they are empty or not calls.
    """
    if not Path(path).is_file():
        raise SamplesError(f"there is no file {path!r} with samples")
    try:
        content = runpy.run_path(str(Path(path)))
    except SyntaxError as error:
        if error.filename is not None:
            raise  # it says where
        raise SamplesError(f"{path!r} is not Python: {error}") from error
    if "samples" not in content:
        raise SamplesError(f"{path} must define `samples`, {_EXPECTED}")
    found = content["samples"]() if callable(content["samples"]) else content["samples"]
    if not isinstance(found, Sequence) or isinstance(found, (str, bytes)):
        found = list(found) if isinstance(found, Iterable) and not isinstance(found, (str, bytes)) else None
    if not found:
        raise SamplesError(f"{path}: `samples` holds no call; it must be {_EXPECTED}")
    calls = []
    for number, sample in enumerate(found):
        if not isinstance(sample, (tuple, list)):
            raise SamplesError(
                f"{path}: sample {number} is a {type(sample).__name__}, not a tuple of arguments; write (x,) for one"
            )
        if len(sample) == 2 and isinstance(sample[0], (tuple, list)) and isinstance(sample[1], dict):
            calls.append((tuple(sample[0]), dict(sample[1])))
        else:
            calls.append((tuple(sample), {}))
    return calls
