"""Private torch names of functions marked by ``torch.compiler.assume_constant_result``: those that Dynamo
called, and their arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch._dynamo.variables import functions as _functions

from fake.seam.patches import LEDGER, Patch, When
from fxpasses.plans.errors import NoPlan

_calls: list[tuple[Callable[..., Any], Sequence[Any], dict[str, Any]]] = []


def _recording_calls(original: Callable[..., Any]) -> Callable[..., Any]:
    _calls.clear()

    @functools.wraps(original)
    def call(tx: Any, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        _calls.append((function, args, kwargs))
        return original(tx, function, name, args, kwargs)

    return call


(MARKED,) = LEDGER.add(
    Patch(
        _functions,
        "invoke_and_store_as_constant",
        _recording_calls,
        when=When.COMPILATION,
        versions=None,
        lost="plans would not know which results were taken for constants",
    )
)


def constant_result_calls() -> list[tuple[Callable[..., Any], list[Any], dict[str, Any]]]:
    """The functions whose results were taken as constants since recording began, with their arguments.

    Raises:
        NoPlan: an argument is not a constant itself.
    """
    try:
        return [
            (
                function,
                [a.as_python_constant() for a in args],
                {k: a.as_python_constant() for k, a in kwargs.items()},
            )
            for function, args, kwargs in _calls
        ]
    except NotImplementedError as error:
        raise NoPlan("a function whose results stand for constants, of an argument that is none") from error
