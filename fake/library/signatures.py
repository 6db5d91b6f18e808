"""Check that a function can be called the way an operator's schema will call it.

All checks run when the function is registered. A function without an introspectable signature (many
built-ins) passes.

>>> import torch
>>> from fake.library.signatures import check_kernel
>>> schema = torch._C.parse_schema("ns::add(Tensor x, *, float alpha=1.0) -> Tensor")
>>> check_kernel("ns::add", "kernel", lambda x, *, alpha=1.0: x, schema)
>>> check_kernel("ns::add", "kernel", lambda x: x, schema)
Traceback (most recent call last):
...
fake.library.errors.SignatureError: ns::add: the kernel does not fit the operator: it has no keyword-only parameter 'alpha'
  expected: (x, *, alpha=1.0)
  got:      (x)
Change the kernel so that its signature is the expected one.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from inspect import Parameter
from types import SimpleNamespace
from typing import Any, NoReturn

from fake.library.errors import SignatureError, SignatureWarning
from fake.library.location import warn_user

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of ``fn``, or None if Python cannot determine it."""
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


class _Parameters:
    """The parameters of a function by kind, and the error for a mismatch.

    Attributes:
        positional: those that can be passed by position, in order.
        by_name: those that can be passed by name.
        kinds: all kinds that occur.
    """

    def __init__(self, op: str, role: str, signature: inspect.Signature, expected: str) -> None:
        self._error_parts = op, role, expected, str(signature.replace(return_annotation=signature.empty))
        parameters = signature.parameters.values()
        self.positional = [p for p in parameters if p.kind in _POSITIONAL]
        self.by_name = {p.name: p for p in parameters if p.kind in _BY_NAME}
        self.kinds = {p.kind for p in parameters}

    def fail(self, problem: str, argument: str | None = None) -> NoReturn:
        op, role, expected, actual = self._error_parts
        raise SignatureError(op, role, problem, expected=expected, actual=actual, argument=argument)

    def refuse_required(self, parameters: Iterable[Parameter], passed: Collection[str], problem: str) -> None:
        """Refuse a parameter that has no default and is not passed.

        Args:
            parameters: the parameters to check.
            passed: the names that the call passes.
            problem: how the error describes it.
        """
        for parameter in parameters:
            if parameter.default is Parameter.empty and parameter.name not in passed:
                only = "keyword-only " if parameter.kind is Parameter.KEYWORD_ONLY else ""
                self.fail(f"{only}parameter {parameter.name!r} {problem}", parameter.name)


def _parameters(op: str, role: str, fn: Callable[..., Any], expected: str) -> _Parameters | None:
    if not callable(fn):
        problem = f"{fn!r} is no function"
        raise SignatureError(op, role, problem, expected=expected, actual=type(fn).__name__)
    signature = signature_of(fn)
    return None if signature is None else _Parameters(op, role, signature, expected)


def _parenthesized(names: Iterable[str]) -> str:
    return f"({', '.join(names)})"


def _signature_text(schema: Any, leading: Sequence[str]) -> str:
    """Return the signature that a schema requires, as text."""
    parts = list(leading)
    for argument in schema.arguments:
        if argument.kwarg_only and "*" not in parts:
            parts.append("*")
        default = f"={argument.default_value!r}" if argument.has_default_value() else ""
        parts.append(argument.name + default)
    return _parenthesized(parts)


def _same_default(mine: Any, schemas: Any) -> bool:
    if isinstance(mine, float) and isinstance(schemas, float):
        return mine == schemas or (math.isnan(mine) and math.isnan(schemas))
    if type(mine) in (int, float, bool, str) and type(schemas) in (int, float, bool, str):
        return bool(mine == schemas)
    if mine is None or schemas is None:
        return mine is schemas
    # dtypes, devices and lists are stored in the schema in forms that do not compare with Python's.
    return True


def check_kernel(
    op: str,
    role: str,
    fn: Callable[..., Any],
    schema: Any,
    *,
    leading: Sequence[str] = (),
    exact: bool = True,
) -> None:
    """Check a kernel, fake kernel or vmap rule against ``schema``.

    Args:
        op: the operator's name, for messages.
        role: what the function is, for messages: ``"kernel"``, ``"vmap rule"``.
        fn: the function.
        schema: the operator's schema.
        leading: parameters that precede the operator's own (``info, in_dims`` of a vmap rule).
        exact: whether names and defaults must be the schema's. If not (operators that others defined), a
            renamed positional parameter is a `SignatureWarning`; one that carries another argument's name
            stays an error.

    Raises:
        SignatureError: the function cannot be called with the operator's arguments, or has another default.
    """
    found = _parameters(op, role, fn, _signature_text(schema, leading))
    if found is None:
        return
    positional = [a for a in schema.arguments if not a.kwarg_only]
    keyword_only = {a.name: a for a in schema.arguments if a.kwarg_only}
    if Parameter.VAR_POSITIONAL not in found.kinds:
        if len(found.positional) < len(leading):
            found.fail(f"it must take {', '.join(leading)} before the operator's arguments")
        count = len(found.positional) - len(leading)
        if count < len(positional):
            missing = positional[count].name
            if missing in found.by_name and found.by_name[missing].kind is Parameter.KEYWORD_ONLY:
                found.fail(
                    f"parameter {missing!r} is keyword-only, the schema passes it by position", missing
                )
            found.fail(f"it takes {count} positional arguments, the schema passes {len(positional)}", missing)
    own = found.positional[len(leading) :]
    others = (p for p in found.by_name.values() if p.kind is Parameter.KEYWORD_ONLY)
    found.refuse_required(
        (*own[len(positional) :], *others), keyword_only, "is not an argument of the operator"
    )
    given = list(zip(positional, own, strict=False))
    for argument, parameter in given:
        _check_name(found, op, role, schema, argument, parameter, exact)
    for name, argument in keyword_only.items():
        if name in found.by_name:
            given.append((argument, found.by_name[name]))
        elif Parameter.VAR_KEYWORD not in found.kinds:
            found.fail(f"it has no keyword-only parameter {name!r}", name)
    for argument, parameter in given if exact else ():
        _check_default(found, argument, parameter)


def _check_name(
    found: _Parameters, op: str, role: str, schema: Any, argument: Any, parameter: Parameter, exact: bool
) -> None:
    name = parameter.name
    if name == argument.name or parameter.kind is Parameter.POSITIONAL_ONLY:
        return
    if any(name == other.name for other in schema.arguments) or (exact and not name.startswith("_")):
        found.fail(f"parameter {name!r} stands where the schema has {argument.name!r}", argument.name)
    if not name.startswith("_"):
        warn_user(
            f"{op}: parameter {name!r} of the {role} is called {argument.name!r} in the schema; "
            "it is passed by position, so this works, but keyword calls read differently",
            SignatureWarning,
        )


def _check_default(found: _Parameters, argument: Any, parameter: Parameter) -> None:
    if parameter.default is Parameter.empty:
        return
    if not argument.has_default_value():
        found.fail(f"parameter {parameter.name!r} has a default, the schema has none", argument.name)
    if not _same_default(parameter.default, argument.default_value):
        found.fail(
            f"the default of {parameter.name!r} is {parameter.default!r}, the schema says {argument.default_value!r}",
            argument.name,
        )


def fill_missing_defaults(fn: Callable[..., Any], schema: Any) -> Callable[..., Any]:
    """Return ``fn``, with the schema's defaults filled in where it has none.

    The dispatcher leaves out arguments that equal their default; without this, such a call would fail inside.
    """
    signature = signature_of(fn)
    if signature is None:
        return fn
    positional = [p for p in signature.parameters.values() if p.kind in _POSITIONAL]
    by_position = [a for a in schema.arguments if not a.kwarg_only]
    first = next((i for i, a in enumerate(by_position) if a.has_default_value()), 0)
    tail = [
        a.default_value
        for a, p in zip(by_position, positional, strict=False)
        if a.has_default_value() and p.default is Parameter.empty
    ]
    keywords = {
        a.name: a.default_value
        for a in schema.arguments
        if a.kwarg_only
        and a.has_default_value()
        and a.name in signature.parameters
        and signature.parameters[a.name].default is Parameter.empty
    }
    if not tail and not keywords:
        return fn

    @functools.wraps(fn)
    def with_defaults(*args: Any, **kwargs: Any) -> Any:
        if tail and len(args) < first + len(tail):
            args = (*args, *tail[len(args) - first :])
        return fn(*args, **{**keywords, **kwargs})

    return with_defaults


def _check_positional(op: str, role: str, fn: Callable[..., Any], expected: Sequence[str]) -> None:
    """Check that ``fn`` takes exactly these parameters, by position."""
    found = _parameters(op, role, fn, _parenthesized(expected))
    if found is None:
        return
    required = sum(p.default is Parameter.empty for p in found.positional)
    enough = Parameter.VAR_POSITIONAL in found.kinds or len(found.positional) >= len(expected)
    if not enough or required > len(expected):
        found.fail(f"it takes {required} positional arguments, it will get {len(expected)}")
    others = (p for p in found.by_name.values() if p.kind is Parameter.KEYWORD_ONLY)
    found.refuse_required(others, (), "is never passed")


def check_backward(op: str, fn: Callable[..., Any], schema: Any) -> None:
    """Check a backward formula: ``(ctx, *one gradient per output)``.

    Args:
        op: the operator's name, for messages.
        fn: the formula.
        schema: the operator's schema.

    Raises:
        SignatureError: it takes a different number of gradients.
    """
    count = len(schema.returns)
    grads = ["grad"] if count == 1 else [f"grad{index}" for index in range(count)]
    _check_positional(op, "backward formula", fn, ["ctx", *grads])


def check_setup_context(op: str, fn: Callable[..., Any], schema: Any) -> None:
    """Check ``setup_context``, which is called by keyword.

    Args:
        op: the operator's name, for messages.
        fn: the function.
        schema: the operator's schema.

    Raises:
        SignatureError: it lacks a keyword that will be passed, or requires another one.
    """
    keyword_only = any(a.kwarg_only for a in schema.arguments)
    expected = ["ctx", "inputs", *(["keyword_only_inputs"] if keyword_only else []), "output"]
    found = _parameters(op, "setup_context", fn, _parenthesized(expected))
    if found is None:
        return
    for name in expected:
        if name not in found.by_name and Parameter.VAR_KEYWORD not in found.kinds:
            why = " (the operator has keyword-only arguments)" if name == "keyword_only_inputs" else ""
            found.fail(f"it is called with {name}=..., which it does not take{why}", name)
    found.refuse_required((*found.positional, *found.by_name.values()), expected, "is never passed")


def check_vmap(op: str, fn: Callable[..., Any], schema: Any) -> None:
    """Check a vmap rule: ``(info, in_dims, *the operator's arguments)``.

    Args:
        op: the operator's name, for messages.
        fn: the rule.
        schema: the operator's schema.

    Raises:
        SignatureError: it cannot be called that way.
    """
    check_kernel(op, "vmap rule", fn, schema, leading=("info", "in_dims"), exact=False)


def check_torch_dispatch(op: str, fn: Callable[..., Any]) -> None:
    """Check a torch_dispatch rule: ``(mode_or_class, func, types, args, kwargs)``.

    Raises:
        SignatureError: it does not take these five arguments.
    """
    _check_positional(op, "torch_dispatch rule", fn, ["mode", "func", "types", "args", "kwargs"])


def as_schema(signature: inspect.Signature) -> Any:
    """Return an author's signature in the form of a schema, for the signature checks."""

    def argument(p: Parameter) -> Any:
        has_default = p.default is not p.empty
        return SimpleNamespace(
            name=p.name,
            kwarg_only=p.kind is p.KEYWORD_ONLY,
            default_value=p.default,
            has_default_value=lambda: has_default,
        )

    return SimpleNamespace(arguments=[argument(p) for p in signature.parameters.values()])
