"""`opcheck`: run the checks and collect their results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fake.library.errors import LibraryError, UnknownOpError
from fake.library.op_def import CustomOpDef
from fake.library.opcheck import (
    aot_dispatch,
    autograd_registration,
    backward_formula,
    fake_device,
    fake_kernel,
    fake_variations,
    functionalization,
    kernel_variations,
    schema_check,
    uninitialized,
    vmap,
)
from fake.library.opcheck.result import CheckFailure, Fault, Passed, Verdict
from fake.library.opcheck.sample_calls import Call
from fake.seam import library as _torch

Check = Callable[..., str]
"""Takes the overload and the sample. Returns a note of what was not tried and why, or raises `Fault`."""

#: Every check by name, in the order in which they run.
ALL_TEST_UTILS: dict[str, Check] = {
    "test_schema": schema_check.check,
    "test_autograd_registration": autograd_registration.check,
    "test_faketensor": fake_kernel.check,
    "test_fake_variations": fake_variations.check,
    "test_fake_device": fake_device.check,
    "test_kernel_variations": kernel_variations.check,
    "test_uninitialized_memory": uninitialized.check,
    "test_functionalization": functionalization.check,
    "test_aot_dispatch_static": functools.partial(aot_dispatch.check, dynamic=False),
    "test_aot_dispatch_dynamic": functools.partial(aot_dispatch.check, dynamic=True),
    "test_gradients": backward_formula.check,
    "test_vmap": vmap.check,
}
#: The checks reported by default: torch's four.
DEFAULT_TEST_UTILS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
#: Checks that operators of other libraries need not pass.
_STRICT = ("test_fake_device", "test_kernel_variations")
#: Checks that also run by default, and are reported only if they fail.
_ALSO_RUN = ("test_fake_variations", *_STRICT, "test_uninitialized_memory", "test_gradients", "test_vmap")


def run_check(name: str, op: Any, call: Call, **options: Any) -> str:
    """Run one check.

    Args:
        name: the check's name.
        op: the overload to check.
        call: the sample.
        options: options of the check.

    Returns:
        A note of what was not tried and why.

    Raises:
        CheckFailure: the check found a fault.
    """
    try:
        return ALL_TEST_UTILS[name](op, call, **options)
    except Fault as found:
        fault = found
    operator = _torch.op_overload_name(op)
    failure = CheckFailure(name, operator, fault.problem, evidence=fault.evidence, fix=fault.fix)
    failure.__context__ = fault.__cause__  # as torch's errors have it
    raise failure from fault.__cause__


class _CheckNamesError(LibraryError, ValueError):
    """Unknown names of checks, or only one of the two tolerances."""


class _SampleError(LibraryError, TypeError):
    """A sample that is not a list of arguments."""


def resolve(op: Any) -> Any:
    """Return the ``OpOverload`` that ``op`` stands for.

    Raises:
        UnknownOpError: ``op`` is not an operator.
        RuntimeError: ``op`` is a packet with several overloads.
    """
    if isinstance(op, _torch.TorchCustomOpDef):
        return op._opoverload
    if isinstance(op, _torch.OpOverloadPacket):
        return _torch.resolve_overload(op)
    if not isinstance(op, _torch.OpOverload):
        raise UnknownOpError(
            "opcheck(op, ...): op must be instance of torch._ops.OpOverload, e.g. torch.ops.aten.sin.default, or a "
            f"custom op, got {type(op)}"
        )
    if _torch.find_schema(_torch.op_overload_name(op)) is None:
        raise UnknownOpError(
            f"opcheck: {op} was destroyed: to call it would end the process; look it up in torch.ops again"
        )
    return op


def opcheck(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    test_utils: str | Sequence[str] | None = None,
    raise_exception: bool = True,
    strict: bool | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> Verdict:
    """Check an operator's registrations on sample arguments.

    Args:
        op: a custom op, an ``OpOverload``, or a packet with one overload.
        args, kwargs: the sample. Use ``requires_grad=True`` if the operator is differentiable.
        test_utils: names of the checks to run, or ``"ALL"``. By default torch's four are reported, and six
            more only if they fail: `test_fake_variations`, `test_uninitialized_memory`, `test_gradients`,
            `test_vmap` and, if ``strict``, `test_fake_device` and `test_kernel_variations`.
        raise_exception: raise the first failure; otherwise the verdict holds it.
        strict: whether fake kernels must also be right for other strides and dtypes than the sample's. By
            default only for operators made by `fake.library`: many of other libraries are right for
            contiguous inputs only. Checks named in ``test_utils`` are always strict.
        rtol, atol: tolerances of value comparisons; give both or neither.

    Returns:
        Check name → ``"SUCCESS"`` or a `CheckFailure`; print it for a report.

    Raises:
        CheckFailure: a check failed and ``raise_exception`` is true. It is an `OpCheckError` with the
            problem, the evidence and a fix.
        ValueError: ``op`` is not an operator, a check's name is unknown, or one tolerance is missing.
        TypeError: ``args`` is not a tuple or list (a bare tensor, for example), or ``kwargs`` is not a
            mapping of arguments that the operator has.

    >>> import torch
    >>> print(opcheck(torch.ops.aten.sin.default, (torch.randn(3),), test_utils="test_schema"))
    aten::sin: all checks passed
      ok    test_schema
    """
    if (rtol is None) != (atol is None):
        raise _CheckNamesError("opcheck(op, ...): if you specify one of rtol/atol, you must specify both")
    overload = resolve(op)
    if not isinstance(args, (tuple, list)) or not (kwargs is None or isinstance(kwargs, Mapping)):
        wrong = ("args", args) if not isinstance(args, (tuple, list)) else ("kwargs", kwargs)
        raise _SampleError(
            f"opcheck({_torch.op_overload_name(overload)}, ...): {wrong[0]} is a {type(wrong[1]).__name__}; pass the sample "
            "as opcheck(op, (x, y), {'name': value}), a tuple also for one argument: (x,)"
        )
    if test_utils is None:
        names: tuple[str, ...] = DEFAULT_TEST_UTILS
    elif test_utils == "ALL":
        names = tuple(ALL_TEST_UTILS)
    else:
        names = (
            (test_utils,)
            if isinstance(test_utils, str) or not isinstance(test_utils, Sequence)
            else tuple(test_utils)
        )
    if not names:
        raise _CheckNamesError(
            "opcheck(op, ..., test_utils=[]): no check would run; name some, or leave it out"
        )
    if not all(isinstance(name, str) and name in ALL_TEST_UTILS for name in names):
        raise _CheckNamesError(
            f"opcheck(op, ..., test_utils={test_utils}), expected test_utils to be subset of {tuple(ALL_TEST_UTILS)} "
            "but it was not"
        )
    call = _call(op, overload, args, kwargs or {})
    if rtol is not None and atol is not None:
        call = dataclasses.replace(call, tolerances={"rtol": rtol, "atol": atol})
    verdict = Verdict(_torch.op_overload_name(overload))
    if is_abstract(call):
        # There is nothing to compare fake or meta tensors with; torch's checks pass them, too.
        return Verdict(verdict.op, {name: Passed("abstract inputs") for name in names})
    besides = _ALSO_RUN if test_utils is None else ()
    if strict is None:
        strict = isinstance(_torch.maybe_get_opdef(overload), CustomOpDef)
    passed: dict[str, Passed] = {}
    for name in (n for n in ALL_TEST_UTILS if n in names or n in besides):
        if name in besides and (not verdict.ok or (name in _STRICT and not strict)):
            continue  # the first fault may be the cause of others
        try:
            loose = name in besides and name == "test_fake_variations" and not strict
            note = run_check(name, overload, call, **({"layouts": False} if loose else {}))
        except CheckFailure as failure:
            if raise_exception:
                raise
            verdict[name] = failure
        else:
            if name in names:
                verdict[name] = Passed(note)
            else:
                passed[name] = Passed(note)
    verdict.also_passed = passed
    return verdict


def _call(op: Any, overload: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    layout = getattr(op, "layout", None)
    if layout is not None:
        args, kwargs = layout.flatten_call(tuple(args), dict(kwargs))
    unknown = set(kwargs) - {a.name for a in overload._schema.arguments}
    if unknown:
        raise _SampleError(
            f"opcheck({_torch.op_overload_name(overload)}, ...): the operator has no argument "
            f"{', '.join(map(repr, sorted(unknown)))}; its schema is {overload._schema}"
        )
    names = tuple(a.name for a in overload._schema.arguments if not a.kwarg_only)
    return Call(tuple(args), dict(kwargs), names=names)


def is_abstract(call: Call) -> bool:
    """Return whether a call has fake or meta tensors."""
    tensors = [t for t in _torch.pytree.tree_leaves((call.args, call.kwargs)) if isinstance(t, torch.Tensor)]
    return any(t.is_meta or isinstance(t, _torch.FakeTensor) for t in tensors)
