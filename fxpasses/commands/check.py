"""Compare a model in eager, after each stage of the compilation, and compiled: results and gradients. Exits with 1 when a
stage is wrong."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import inspect
import sys
import types
from pathlib import Path
from typing import Any

from fxpasses.commands.outcome import Outcome, UsageError, plain_data, working

HELP = "compare a model in eager, after each stage, and compiled"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the model and how it is compiled."""
    parser.add_argument(
        "model",
        help="MODULE:FUNCTION or FILE.py:FUNCTION; the function returns a model and a tuple of inputs",
    )
    parser.add_argument("--compiler", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--dynamic", action="store_true", help="with symbolic sizes")
    parser.add_argument("--no-backward", action="store_true", help="without gradients")
    parser.add_argument(
        "--seconds", type=float, help="how long passes are tried on made-up inputs (as long as it takes)"
    )
    parser.add_argument(
        "--option",
        action="append",
        type=_option,
        default=[],
        metavar="NAME=VALUE",
        help="an option of the backend, such as regions=always or memory_budget=0.5; may be given several times",
    )


def run(arguments: argparse.Namespace) -> Outcome:
    """Make the model, and check it; the table is printed when it is done."""
    model, inputs = model_named(arguments.model)
    with working("importing torch"):
        from fxpasses.checking.model import check
    result = check(
        model,
        inputs,
        options={"compiler": arguments.compiler, **dict(arguments.option)},
        dynamic=arguments.dynamic or None,
        backward=not arguments.no_backward,
        seconds=arguments.seconds,
    )
    return Outcome(0 if result.ok else 1, {"ok": result.ok, **plain_data(result)})


def model_named(text: str) -> tuple[Any, tuple[Any, ...]]:
    """The model and inputs that the function named returns. Raises: UsageError: where there is no such function, or it returns something else."""
    make = function_named(text)
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise UsageError(
            f"{text}: {error}; it is called without arguments, and returns a model and its inputs"
        ) from error
    except ValueError:  # of a builtin, which has no signature
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
    """The function that ``MODULE:NAME`` or ``FILE.py:NAME`` names. Raises: UsageError: where there is no such function."""
    found = object_named(text, "function")
    if not callable(found):
        source, _, name = text.rpartition(":")
        raise UsageError(f"{source!r} has no function {name!r}")
    return found


def object_named(text: str, what: str) -> Any:
    """What ``MODULE:NAME`` or ``FILE.py:NAME`` names. Raises: UsageError: where there is no such thing."""
    source, _, name = text.rpartition(":")
    if not source or not name:
        expected = what.upper()
        raise UsageError(f"expected FILE.py:{expected} or MODULE:{expected}, got {text!r}")
    if source.endswith(".py"):
        if not Path(source).is_file():
            raise UsageError(f"there is no file {source!r}")
        try:
            found = vars(_module_of(Path(source)))
        except SyntaxError as error:
            if error.filename is not None:
                raise  # it says where
            raise UsageError(f"{source!r} is not Python: {error}") from error
    else:
        if source.startswith(".") or importlib.util.find_spec(source.partition(".")[0]) is None:
            meant = f"; for the file, write {source}.py:{name}" if Path(f"{source}.py").is_file() else ""
            raise UsageError(f"there is no module {source!r}{meant}")
        try:
            found = vars(importlib.import_module(source))
        except ModuleNotFoundError as error:
            if error.name is None or not source.startswith(error.name):
                raise  # the module itself imports something that is not there
            raise UsageError(f"there is no module {error.name!r}") from error
    if name not in found:
        raise UsageError(f"{source!r} has no {what} {name!r}")
    return found[name]


def _module_of(path: Path) -> types.ModuleType:
    """The module of a file that is no import's; under its name Dynamo finds the globals of functions that it cuts in two."""
    name = f"_fxpasses_{path.stem}"
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = str(path)
    exec(compile(path.read_bytes(), path, "exec"), vars(module))
    return module


def _option(text: str) -> tuple[str, Any]:
    """``regions=always`` as a name and a value: a Python literal, or else text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
