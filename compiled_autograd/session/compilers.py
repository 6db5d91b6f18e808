"""Normalization of what ``enable`` accepts as a compiler."""

import inspect
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from compiled_autograd import _torch
from compiled_autograd.errors import InvalidCompilerError
from compiled_autograd.session.session import sessions


class Compiler:
    """A compiler of backward graphs.

    ``whole(module)`` compiles a whole graph with ``compiler_fn``; it returns None for a backend, which only
    ever sees ATen. ``part(whole)`` returns a compiler of single segments, or None if only the whole can be
    compiled.
    """

    def __init__(self, function: Any, key: Any, is_backend: bool) -> None:
        self.function = function
        self.key = key
        self.is_backend = is_backend

    def whole(self, module: fx.GraphModule) -> Callable[..., Any] | None:
        """Compile a whole graph."""
        if self.is_backend:
            return None
        started = time.perf_counter()
        result = self.function(module)
        sessions.records.add_seconds("compile", time.perf_counter() - started)
        sessions.records.count("compiles")
        if not callable(result):
            raise InvalidCompilerError(
                self.function, f"it returned a {type(result).__name__}, which is not callable"
            )
        return result

    def part(self, whole: Any, dynamic: bool) -> Callable[[fx.GraphModule], Callable[..., Any]] | None:
        """Return a function that compiles a module of one list argument with the same settings."""
        if self.is_backend:
            return lambda module: torch.compile(module, backend=self.function, dynamic=dynamic or None)
        if isinstance(whole, _torch.OptimizedModule):
            return whole.dynamo_ctx
        return None

    def backend(self) -> Callable[..., Any] | None:
        """Return the backend to call directly with flat ATen, if there is one."""
        return self.function if self.is_backend else None


def _required_parameters(function: Callable[..., Any]) -> int | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is inspect.Parameter.empty for p in parameters)


def as_compiler(compiler_fn: Any) -> Compiler:
    """Make a `Compiler` from a function of a graph, a backend function, or a backend's name.

    A function that requires two arguments is a backend, as for ``torch.compile(backend=...)``. Any other
    function is called with the graph alone.

    Raises:
        InvalidCompilerError: for anything else, before anything is enabled.
    """
    if isinstance(compiler_fn, Compiler):
        return compiler_fn
    if isinstance(compiler_fn, str):
        return Compiler(_torch.lookup_backend(compiler_fn), compiler_fn, is_backend=True)
    if not callable(compiler_fn):
        raise InvalidCompilerError(compiler_fn, f"got a {type(compiler_fn).__name__}")
    required = _required_parameters(compiler_fn)
    if required is not None and required > 2:
        raise InvalidCompilerError(compiler_fn, f"it requires {required} arguments")
    return Compiler(compiler_fn, compiler_key(compiler_fn), is_backend=required == 2)


def compiler_key(function: Any) -> Any:
    """Return a key that is equal for two compilers that are the same one.

    A lambda in a training loop is a new object at each step, but the same code with the same values is the
    same compiler. Values are compared by identity, and the key keeps them alive.
    """
    if inspect.ismethod(function):
        return (compiler_key(function.__func__), _Identity(function.__self__))
    if inspect.isfunction(function):
        cells = tuple(_cell(cell) for cell in function.__closure__ or ())
        defaults = tuple(_Identity(value) for value in function.__defaults__ or ())
        keywords = tuple((name, _Identity(value)) for name, value in (function.__kwdefaults__ or {}).items())
        return (function.__code__, cells, defaults, keywords, _Identity(function.__globals__))
    return _Identity(function)


def _cell(cell: Any) -> Any:
    try:
        return _Identity(cell.cell_contents)
    except ValueError:  # not filled yet
        return _Identity(cell)


class _Identity:
    """Equal only for the same object."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)
