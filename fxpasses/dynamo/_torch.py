"""The private names of ``torch._dynamo`` that tracing for our backend relies on. Known to fit torch 2.11 and 2.13."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch._dynamo import convert_frame

__all__ = ["restore_compilations", "surround_compilations"]

_ORIGINAL = "_fxpasses_original"


def surround_compilations(around: Callable[[Any, Mapping[str, Any]], AbstractContextManager[Any]]) -> bool:
    """Have every compilation of a frame by Dynamo run inside of ``around(backend function, its keyword arguments)``.

    ``convert_frame._compile`` is what Dynamo's entry points call by its global name, once for each frame, with the
    backend as ``compiler_fn``. Callbacks of ``torch._dynamo.callback`` are not told the backend, and
    ``torch._dynamo.reset()`` forgets them.

    Returns: whether it is done; not where this version of torch has another signature.
    """
    original = convert_frame._compile
    if hasattr(original, _ORIGINAL):
        return True
    names = list(inspect.signature(original).parameters)
    if "compiler_fn" not in names:
        return False
    position = names.index("compiler_fn")

    @functools.wraps(original)
    def compile_frame(*args: Any, **kwargs: Any) -> Any:
        given = args[position] if position < len(args) else kwargs["compiler_fn"]
        with around(*_backend(given)):
            return original(*args, **kwargs)

    setattr(compile_frame, _ORIGINAL, original)
    convert_frame._compile = compile_frame
    return True


def restore_compilations() -> None:
    """Undo :func:`surround_compilations`."""
    convert_frame._compile = getattr(convert_frame._compile, _ORIGINAL, convert_frame._compile)


def _backend(given: Any) -> tuple[Any, Mapping[str, Any]]:
    """The function behind the wrappers that ``torch.compile`` puts around a backend, and what it is called with."""
    keywords: dict[str, Any] = {}
    while True:
        keywords = {**getattr(given, "kwargs", {}), **keywords}
        inner = getattr(given, "compiler_fn", None) or getattr(given, "_torchdynamo_orig_backend", None)
        if inner is None or inner is given:
            return given, keywords
        given = inner
