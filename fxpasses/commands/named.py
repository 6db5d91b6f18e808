"""Resolves names given to commands: objects in files and modules, and operators with sample calls."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fxpasses.commands.outcome import UsageError
from fxpasses.errors import did_you_mean

Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]
"""The positional and keyword arguments of each call."""


def model_named(text: str) -> tuple[Any, tuple[Any, ...]]:
    """Return the model and inputs that the named function returns.

    Raises:
        UsageError: there is no such function, or it returns something else.
    """
    make = function_named(text)
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise UsageError(
            f"{text}: {error}; it is called without arguments, and has to return a model and its inputs"
        ) from error
    except ValueError:  # a builtin may have no signature
        pass
    made = make()
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
        kinds = ", ".join(type(part).__name__ for part in made) if isinstance(made, tuple) else ""
        raise UsageError(
            f"{make.__name__}() returned {f'({kinds})' if kinds else type(made).__name__}; "
            "it has to return a pair: the model, and a tuple of its inputs"
        )
    return made[0], made[1] if isinstance(made[1], tuple) else (made[1],)


def function_named(text: str) -> Any:
    """Return the function ``MODULE:NAME`` or ``FILE.py:NAME``. Raises: UsageError: it does not exist."""
    found = object_named(text, "function")
    if not callable(found):
        source, _, name = text.rpartition(":")
        raise UsageError(f"{source!r} has no function {name!r}")
    return found


def object_named(text: str, what: str) -> Any:
    """Return the object ``MODULE:NAME`` or ``FILE.py:NAME``. Raises: UsageError: it does not exist."""
    source, _, name = text.rpartition(":")
    if not source or not name:
        expected = what.upper()
        raise UsageError(f"expected FILE.py:{expected} or MODULE:{expected}, got {text!r}")
    found: Any = _run_file(source) if source.endswith(".py") else _import_module(source, name)
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{source!r} has no {what} {name!r}{did_you_mean(part, dir(found))}")
        found = getattr(found, part)
    return found


def _import_module(source: str, name: str) -> types.ModuleType:
    if source.startswith(".") or importlib.util.find_spec(source.partition(".")[0]) is None:
        meant = f"; for the file, write {source}.py:{name}" if Path(f"{source}.py").is_file() else ""
        raise UsageError(f"there is no module {source!r}{meant}")
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is None or not source.startswith(error.name):
            raise  # the module itself imports something that is missing
        raise UsageError(f"there is no module {error.name!r}") from error


def _run_file(file: str) -> types.ModuleType:
    """Run a file as a module and return it.

    It is in ``sys.modules``: when Dynamo splits a function at a graph break, it finds the globals by module
    name.
    """
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"there is no file {file!r}")
    name = f"_fxpasses_{path.stem}"
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = file
    try:
        exec(compile(path.read_bytes(), path, "exec"), vars(module))
    except SyntaxError as error:
        if error.filename is not None:
            raise  # the error names the file
        raise UsageError(f"{file!r} is not Python: {error}") from error
    return module


def add_operator(parser: argparse.ArgumentParser) -> None:
    """Declare the operator and ``--samples``."""
    parser.add_argument(
        "op",
        help="MODULE:OPERATOR or FILE.py:OPERATOR, or namespace::name of an operator "
        "that the samples file imports",
    )
    parser.add_argument("--samples", required=True, metavar="FILE", help="Python file that defines `samples`")


def read_operator(arguments: argparse.Namespace) -> tuple[Any, Calls]:
    """Return the operator and its sample calls.

    Raises:
        UsageError: the operator or the samples do not exist.
    """
    from fake.library.errors import UnknownOpError
    from fake.library.opcheck.runner import resolve

    samples = _read_samples(arguments.samples)
    if ":" not in arguments.op:
        expected = "FILE.py:OPERATOR, MODULE:OPERATOR or namespace::name"
        raise UsageError(f"expected {expected}, got {arguments.op!r}")
    op = (
        _registered_operator(arguments.op) if "::" in arguments.op else object_named(arguments.op, "operator")
    )
    try:
        resolve(op)
    except (UnknownOpError, RuntimeError) as error:
        raise UsageError(str(error)) from error
    return op, samples


def _registered_operator(name: str) -> Any:
    """Return the operator ``namespace::name`` or ``namespace::name.overload``."""
    import torch

    namespace, _, operator = name.partition("::")
    packet, _, overload = operator.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except AttributeError as error:
        raise UsageError(
            f"there is no operator {name}; in the samples file, import the module that defines it"
        ) from error


_SAMPLES = "a list of argument tuples or (args, kwargs) pairs, or a function that returns one"


def _read_samples(file: str) -> Calls:
    """Return the sample calls of a Python file.

    Its ``samples`` is a list of argument tuples or ``(args, kwargs)`` pairs, or a function that returns one.
    """
    content = vars(_run_file(file))
    if "samples" not in content:
        raise UsageError(f"{file} must define `samples`, {_SAMPLES}")
    found = content["samples"]() if callable(content["samples"]) else content["samples"]
    found = list(found) if isinstance(found, Iterable) and not isinstance(found, (str, bytes)) else None
    if not found:
        raise UsageError(f"{file}: `samples` holds no call; it must be {_SAMPLES}")
    calls: Calls = []
    for number, sample in enumerate(found):
        if not isinstance(sample, (tuple, list)):
            raise UsageError(
                f"{file}: sample {number} is a {type(sample).__name__}, "
                "not a tuple of arguments; write (x,) for a single argument"
            )
        if len(sample) == 2 and isinstance(sample[0], (tuple, list)) and isinstance(sample[1], dict):
            calls.append((tuple(sample[0]), dict(sample[1])))
        else:
            calls.append((tuple(sample), {}))
    return calls
