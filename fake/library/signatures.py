"""Checks that a function can be called the way an operator's schema will call it.

All checks run when the function is registered. A function whose signature Python cannot tell (many
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from fake.library.errors import SignatureError, SignatureWarning
from fake.library.location import warn_user

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class _Shape:
    """The parameters of a function, by kind."""

    text: str
    positional: tuple[Parameter, ...]
    keywords: dict[str, Parameter]
    takes_any_positional: bool
    takes_any_keyword: bool


def signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of ``fn``, or None where Python cannot tell it."""
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


def _shape_of(fn: Callable[..., Any]) -> _Shape | None:
    signature = signature_of(fn)
    if signature is None:
        return None
    parameters = list(signature.parameters.values())
    return _Shape(
        text=str(signature.replace(return_annotation=inspect.Signature.empty)),
        positional=tuple(p for p in parameters if p.kind in _POSITIONAL),
        keywords={
            p.name: p
            for p in parameters
            if p.kind in (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        },
        takes_any_positional=any(p.kind is Parameter.VAR_POSITIONAL for p in parameters),
        takes_any_keyword=any(p.kind is Parameter.VAR_KEYWORD for p in parameters),
    )


def _expected_text(schema: Any, leading: Sequence[str] = ()) -> str:
    parts = list(leading)
    starred = False
    for argument in schema.arguments:
        if argument.kwarg_only and not starred:
            parts.append("*")
            starred = True
        default = f"={argument.default_value!r}" if argument.has_default_value() else ""
        parts.append(argument.name + default)
    return "(" + ", ".join(parts) + ")"


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
    names_matter: bool = True,
    defaults_matter: bool = True,
) -> None:
    """Check a kernel, fake kernel or vmap rule against ``schema``.

    Args:
        op: the operator's name, for messages.
        role: what the function is, for messages: ``"kernel"``, ``"vmap rule"``.
        fn: the function.
        schema: the operator's schema.
        leading: parameters that come before the operator's own (``info, in_dims`` of a vmap rule).
        names_matter: if not (operators that others defined), a renamed positional parameter is a `SignatureWarning`; one that
            carries the name of a different argument stays an error.
        defaults_matter: whether another default than the schema's is an error.

    Raises:
        SignatureError: the function cannot be called with the operator's arguments, or gives one another default.
    """
    shape = _shape_of(fn)
    if shape is None:
        return
    expected = _expected_text(schema, leading)

    def fail(problem: str, argument: str | None = None) -> None:
        raise SignatureError(op, role, problem, expected=expected, actual=shape.text, argument=argument)

    positional = [a for a in schema.arguments if not a.kwarg_only]
    keyword_only = [a for a in schema.arguments if a.kwarg_only]
    available = list(shape.positional)
    if len(available) < len(leading) and not shape.takes_any_positional:
        fail(f"it must take {', '.join(leading)} before the operator's arguments")
    own = available[len(leading) :]

    if len(own) < len(positional) and not shape.takes_any_positional:
        missing = positional[len(own)]
        parameter = shape.keywords.get(missing.name)
        if parameter is not None and parameter.kind is Parameter.KEYWORD_ONLY:
            fail(
                f"parameter {missing.name!r} is keyword-only, the schema passes it by position", missing.name
            )
        fail(f"it takes {len(own)} positional arguments, the schema passes {len(positional)}", missing.name)
    consumed_by_keyword = {a.name for a in keyword_only}
    for parameter in own[len(positional) :]:
        if parameter.default is Parameter.empty and parameter.name not in consumed_by_keyword:
            fail(f"parameter {parameter.name!r} is not an argument of the operator", parameter.name)

    argument_names = {a.name for a in schema.arguments}
    for argument, parameter in zip(positional, own, strict=False):
        if parameter.name != argument.name and parameter.kind is not Parameter.POSITIONAL_ONLY:
            if parameter.name in argument_names or (names_matter and not parameter.name.startswith("_")):
                fail(
                    f"parameter {parameter.name!r} stands where the schema has {argument.name!r}",
                    argument.name,
                )
            elif not parameter.name.startswith("_"):
                warn_user(
                    f"{op}: parameter {parameter.name!r} of the {role} is called {argument.name!r} in the schema; "
                    "it is passed by position, so this works, but keyword calls read differently",
                    SignatureWarning,
                )
        if defaults_matter:
            _check_default(fail, argument, parameter)

    for argument in keyword_only:
        keyword = shape.keywords.get(argument.name)
        if keyword is None:
            if not shape.takes_any_keyword:
                fail(f"it has no keyword-only parameter {argument.name!r}", argument.name)
        elif defaults_matter:
            _check_default(fail, argument, keyword)
    for parameter in shape.keywords.values():
        if (
            parameter.kind is Parameter.KEYWORD_ONLY
            and parameter.name not in argument_names
            and parameter.default is Parameter.empty
        ):
            fail(
                f"keyword-only parameter {parameter.name!r} is not an argument of the operator",
                parameter.name,
            )


def _check_default(fail: Callable[..., None], argument: Any, parameter: Parameter) -> None:
    if parameter.default is Parameter.empty:
        return
    if not argument.has_default_value():
        fail(f"parameter {parameter.name!r} has a default, the schema has none", argument.name)
    elif not _same_default(parameter.default, argument.default_value):
        fail(
            f"the default of {parameter.name!r} is {parameter.default!r}, the schema says {argument.default_value!r}",
            argument.name,
        )


def fill_missing_defaults(fn: Callable[..., Any], schema: Any) -> Callable[..., Any]:
    """Return ``fn``, or ``fn`` with the defaults that the schema has and ``fn`` lacks.

    The dispatcher leaves out arguments that equal their default; without this, such a call fails inside.
    """
    shape = _shape_of(fn)
    if shape is None:
        return fn
    missing: dict[int | str, Any] = {}
    for index, argument in enumerate(a for a in schema.arguments if not a.kwarg_only):
        lacks = index < len(shape.positional) and shape.positional[index].default is Parameter.empty
        if argument.has_default_value() and lacks:
            missing[index] = argument.default_value
    for argument in (a for a in schema.arguments if a.kwarg_only):
        keyword = shape.keywords.get(argument.name)
        if argument.has_default_value() and keyword is not None and keyword.default is Parameter.empty:
            missing[argument.name] = argument.default_value
    if not missing:
        return fn
    tail = [missing[i] for i in sorted(k for k in missing if isinstance(k, int))]
    first = min((k for k in missing if isinstance(k, int)), default=0)
    keywords = {k: v for k, v in missing.items() if isinstance(k, str)}

    @functools.wraps(fn)
    def with_defaults(*args: Any, **kwargs: Any) -> Any:
        if tail and len(args) < first + len(tail):
            args = (*args, *tail[len(args) - first :])
        return fn(*args, **{**keywords, **kwargs})

    return with_defaults


def _check_positional_count(op: str, role: str, fn: Callable[..., Any], expected: Sequence[str]) -> None:
    shape = _shape_of(fn)
    if shape is None:
        return
    required = [p for p in shape.positional if p.default is Parameter.empty]
    text = "(" + ", ".join(expected) + ")"
    enough = shape.takes_any_positional or len(shape.positional) >= len(expected)
    if not enough or len(required) > len(expected):
        raise SignatureError(
            op,
            role,
            f"it takes {len(required)} positional arguments, it will get {len(expected)}",
            expected=text,
            actual=shape.text,
        )
    for parameter in shape.keywords.values():
        if parameter.kind is Parameter.KEYWORD_ONLY and parameter.default is Parameter.empty:
            raise SignatureError(
                op,
                role,
                f"keyword-only parameter {parameter.name!r} is never passed",
                expected=text,
                actual=shape.text,
                argument=parameter.name,
            )


def check_backward(op: str, fn: Callable[..., Any], schema: Any) -> None:
    """Check a backward formula: ``(ctx, *one gradient per return)``.

    Args:
        op: the operator's name, for messages.
        fn: the formula.
        schema: the operator's schema.

    Raises:
        SignatureError: it takes another number of gradients.
    """
    count = len(schema.returns)
    grads = ["grad"] if count == 1 else [f"grad{index}" for index in range(count)]
    _check_positional_count(op, "backward formula", fn, ["ctx", *grads])


def check_setup_context(op: str, fn: Callable[..., Any], schema: Any) -> None:
    """Check ``setup_context``, which is called by keyword.

    Args:
        op: the operator's name, for messages.
        fn: the function.
        schema: the operator's schema.

    Raises:
        SignatureError: a keyword that will be passed is missing, or another one is required.
    """
    shape = _shape_of(fn)
    if shape is None:
        return
    keyword_only = any(a.kwarg_only for a in schema.arguments)
    expected = ["ctx", "inputs", *(["keyword_only_inputs"] if keyword_only else []), "output"]
    text = "(" + ", ".join(expected) + ")"

    def fail(problem: str, argument: str) -> None:
        raise SignatureError(
            op, "setup_context", problem, expected=text, actual=shape.text, argument=argument
        )

    for name in expected:
        if name not in shape.keywords and not shape.takes_any_keyword:
            why = " (the operator has keyword-only arguments)" if name == "keyword_only_inputs" else ""
            fail(f"it is called with {name}=..., which it does not take{why}", name)
    for parameter in (*shape.positional, *shape.keywords.values()):
        if parameter.default is Parameter.empty and parameter.name not in expected:
            fail(f"parameter {parameter.name!r} is never passed", parameter.name)


def check_vmap(op: str, fn: Callable[..., Any], schema: Any) -> None:
    """Check a vmap rule: ``(info, in_dims, *the operator's arguments)``.

    Args:
        op: the operator's name, for messages.
        fn: the rule.
        schema: the operator's schema.

    Raises:
        SignatureError: it cannot be called that way.
    """
    check_kernel(
        op, "vmap rule", fn, schema, leading=("info", "in_dims"), names_matter=False, defaults_matter=False
    )


def check_torch_dispatch(op: str, fn: Callable[..., Any]) -> None:
    """Check a torch_dispatch rule: ``(mode_or_class, func, types, args, kwargs)``.

    Raises:
        SignatureError: it does not take these five arguments.
    """
    _check_positional_count(op, "torch_dispatch rule", fn, ["mode", "func", "types", "args", "kwargs"])


class SignatureSchema:
    """An author's signature in the shape of a schema, for the signature checks."""

    class _Argument:
        def __init__(self, parameter: Any) -> None:
            self.name = parameter.name
            self.kwarg_only = parameter.kind is parameter.KEYWORD_ONLY
            self._default = parameter.default
            self._empty = parameter.empty

        def has_default_value(self) -> bool:
            return self._default is not self._empty

        @property
        def default_value(self) -> Any:
            return self._default

    def __init__(self, signature: inspect.Signature) -> None:
        self.arguments = [self._Argument(p) for p in signature.parameters.values()]
