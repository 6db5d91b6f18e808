"""`generate_opcheck_tests`: every test of a test case once more for each check, on every operator that it calls."""

from __future__ import annotations

import functools
import os
import sys
import threading
import unittest
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fake.error_text import error_text
from fake.library import _torch
from fake.library.errors import OpCheckError
from fake.library.opcheck.failures import (
    ACCEPT_VARIABLE,
    FailuresDict,
    should_update,
    validate_failures_dict_formatting,
    validate_failures_dict_structure,
)
from fake.library.opcheck.inputs import Call
from fake.library.opcheck.repro import generate_repro
from fake.library.opcheck.runner import ALL_TEST_UTILS, DEFAULT_TEST_UTILS, resolve

__all__ = ["OpCheckMode", "dont_generate_opcheck_tests", "generate_opcheck_tests", "is_inside_opcheck_mode"]

#: Set to 1 in the environment, a failure's arguments are saved and its repro loads them.
REPRO_VARIABLE = "PYTORCH_OPCHECK_PRINT_BETTER_REPRO"


class _State(threading.local):
    inside = False


_state = _State()


def is_inside_opcheck_mode() -> bool:
    """Whether this thread runs a generated test."""
    return _state.inside


def dont_generate_opcheck_tests(reason: str) -> Callable[[Any], Any]:
    """Decorator for tests that `generate_opcheck_tests` leaves alone."""

    def mark(test: Any) -> Any:
        test._torch_dont_generate_opcheck_tests = reason or True
        return test

    return mark


class OpCheckMode(TorchFunctionMode):
    """Runs one check on every call of an operator in ``namespaces``; what fails is raised on exit.

    Args:
        namespaces: the operators to look at.
        test_util_name: name of the check.
        test_util: ``test_util(op, args, kwargs)``, which raises on failure.
        failures_dict: expected failures.
        test_name: name of the generated test in it.
        failures_dict_path: where it is kept.
    """

    def __init__(
        self,
        namespaces: Sequence[str],
        test_util_name: str,
        test_util: Callable[..., Any],
        failures_dict: Any,
        test_name: str,
        failures_dict_path: str,
    ) -> None:
        super().__init__()
        self.namespaces = namespaces
        self.test_util_name = test_util_name
        self.test_util = test_util
        self.failures_dict = failures_dict
        self.test_name = test_name
        self.failures_dict_path = failures_dict_path
        self.seen: dict[str, list[tuple[Exception, Any, Any, Any]]] = {}

    def __enter__(self) -> OpCheckMode:
        self._before = _state.inside, os.environ.get("TORCHDYNAMO_DISABLE")
        _state.inside = True
        # The test would check operators inside compiled regions with fake inputs, which says nothing.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        _state.inside, disabled = self._before
        if disabled is None:
            os.environ.pop("TORCHDYNAMO_DISABLE", None)
        else:
            os.environ["TORCHDYNAMO_DISABLE"] = disabled
        super().__exit__(exc_type, exc_value, traceback)
        if exc_type is None:
            self._finish()
            if should_update() and self.failures_dict is not None:
                self.failures_dict.save()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            not isinstance(func, (_torch.OpOverload, _torch.OpOverloadPacket))
            or torch.compiler.is_compiling()
        ):
            return func(*args, **kwargs)
        op = resolve(func)
        qualname = _torch.op_overload_name(op)
        if qualname.split("::")[0] not in self.namespaces:
            return func(*args, **kwargs)
        call = Call(tuple(args), dict(kwargs)).copy()
        result = func(*args, **kwargs)
        if self.failures_dict.get_status(qualname, self.test_name) != "skip":
            failures = self.seen.setdefault(qualname, [])
            try:
                self.test_util(op, call.args, call.kwargs)
            except Exception as error:  # noqa: BLE001  kept and raised on exit, or expected
                failures.append((error, op, call.args, call.kwargs))
        return result

    def _finish(self) -> None:
        unexpected = []
        for qualname, failures in self.seen.items():
            status = self.failures_dict.get_status(qualname, self.test_name)
            if not failures and status == "xfail":
                if should_update():
                    self.failures_dict.set_status(qualname, self.test_name, "xsuccess")
                    continue
                raise OpCheckError(
                    f"generate_opcheck_tests: Unexpected success for operator {qualname} on test {self.test_name}. "
                    f"If you have fixed it, rerun the test with {ACCEPT_VARIABLE}=1 to update "
                    f"{self.failures_dict_path}, or remove the entry by hand.",
                    op=qualname,
                )
            if failures and status == "xsuccess":
                unexpected.append(qualname)
        if should_update():
            for qualname in unexpected:
                self.failures_dict.set_status(qualname, self.test_name, "xfail")
            return
        if unexpected:
            error, op, args, kwargs = self.seen[unexpected[0]][0]
            better = os.environ.get(REPRO_VARIABLE) == "1"
            repro = generate_repro(self.test_util_name, op, args, kwargs, save_data=better)
            raise OpCheckError(
                f"Test generated by `generate_opcheck_tests`, {self.test_name}, failed on operators {unexpected}: "
                f"{error_text(error)}\nSet {REPRO_VARIABLE}=1 for a repro with data. To reproduce this:\n{repro}",
                op=unexpected[0],
            ) from error


def _tester(name: str) -> Callable[[Any, Any, Any], None]:
    def run(op: Any, args: Any, kwargs: Any) -> None:
        call = Call(tuple(args), dict(kwargs))
        tensors = [
            leaf for leaf in _torch.pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        ]
        if any(t.is_meta or isinstance(t, _torch.FakeTensor) for t in tensors):
            return
        ALL_TEST_UTILS[name](op, call)

    return run


def generate_opcheck_tests(
    testcase: Any,
    namespaces: Sequence[str],
    failures_dict_path: str | None = None,
    additional_decorators: dict[str, Sequence[Callable[[Any], Any]]] | None = None,
    test_utils: Sequence[str] = DEFAULT_TEST_UTILS,
) -> None:
    """Add ``{check}__{test}`` to ``testcase`` for each of its tests and each check.

    The new test runs the old one and applies the check to every call of an operator in ``namespaces``. Operators that
    are known to fail are listed in a `FailuresDict` file (by default ``failures_dict.json`` next to the caller);
    ``test_pt2_compliant_tag_{op}`` tests say when such an operator nevertheless carries the compliance tag.

    Args:
        testcase: a ``unittest.TestCase`` class; tests are added to it.
        namespaces: whose operators are checked.
        failures_dict_path: the file of operators that are known to fail.
        additional_decorators: decorators by the name of a generated test.
        test_utils: names of the checks.

    Raises:
        OpCheckError: the file has wrong entries, or a generated name is taken.
        FileNotFoundError: there is no such file.
    """
    decorators = additional_decorators or {}
    if failures_dict_path is None:
        caller = sys._getframe(1).f_code.co_filename
        failures_dict_path = os.path.join(os.path.dirname(os.path.abspath(caller)), "failures_dict.json")
    failures = FailuresDict.load(failures_dict_path, create_file=should_update())
    validate_failures_dict_structure(failures, test_utils, testcase)
    validate_failures_dict_formatting(failures_dict_path)
    tests = [n for n in dir(testcase) if n.startswith("test_") and callable(getattr(testcase, n))]
    for test in tests:
        method = getattr(testcase, test)
        if getattr(method, "_torch_dont_generate_opcheck_tests", False):
            continue
        for check in test_utils:
            name = f"{check}__{test}"
            _add(testcase, name, _generated(testcase, method, check, name, namespaces, failures), decorators)
    for qualname, entries in failures.data.items():
        failing = [
            t
            for t, entry in entries.items()
            if entry["status"] == "xfail" and "test_aot_dispatch_static" not in t
        ]
        name = "test_pt2_compliant_tag_" + qualname.replace("::", "_").replace(".", "_")
        _add(testcase, name, _tag_test(qualname, failing), decorators)


def _add(testcase: Any, name: str, test: Any, decorators: dict[str, Sequence[Callable[[Any], Any]]]) -> None:
    for decorate in decorators.get(name, ()):
        test = decorate(test)
    if hasattr(testcase, name):
        raise OpCheckError(
            f"Tried to autogenerate {name} but {testcase} already has method named {name}. Please rename the original."
        )
    setattr(testcase, name, test)


def _generated(
    testcase: Any, method: Any, check: str, name: str, namespaces: Sequence[str], failures: FailuresDict
) -> Any:
    @functools.wraps(method)
    def test(*args: Any, **kwargs: Any) -> Any:
        full_name = f"{testcase.__name__}.{name}"
        with OpCheckMode(namespaces, check, _tester(check), failures, full_name, str(failures.path)):
            return method(*args, **kwargs)

    return test


def _tag_test(qualname: str, failing: list[str]) -> Any:
    def test(self: Any) -> None:
        try:
            op = _torch.lookup_op(qualname)
        except AttributeError as error:
            raise unittest.SkipTest(f"Can't import operator {qualname}") from error
        if torch.Tag.pt2_compliant_tag in op.tags and failing:
            raise AssertionError(
                f"op '{qualname}' was tagged with torch.Tag.pt2_compliant_tag but it failed some of the generated "
                f"opcheck tests ({failing}). This may lead to silent correctness issues, please fix this."
            )

    return test
