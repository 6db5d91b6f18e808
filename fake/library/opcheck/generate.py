"""`generate_opcheck_tests`: repeat every test of a test case for each check, on every operator that it calls.

This is torch's own generator with this package's checks: a copy of its module is executed, with names
replaced by ours. Expected failures are kept in a file of torch's format.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fake.library.errors import OpCheckError
from fake.library.opcheck.runner import ALL_TEST_UTILS, DEFAULT_TEST_UTILS, is_abstract, run_check
from fake.library.opcheck.sample_calls import Call
from fake.seam import library as _torch


@functools.cache
def patched_optests() -> Any:
    """Return a copy of torch's module with our checks and `OpCheckError`, and repro scripts that use them."""
    module = _torch.load_optests_copy()
    module.ALL_TEST_UTILS = {name: _make_tester(name) for name in ALL_TEST_UTILS}
    module.OpCheckError = OpCheckError
    module._is_inside_opcheck_mode = _ThreadFlag()
    write_repro, read = module.generate_repro, module.FailuresDict.load

    def generate_repro(*args: Any, **kwargs: Any) -> str:
        return write_repro(*args, **kwargs).replace(_torch.OPTESTS, "fake.library")

    class FailuresDict(module.FailuresDict):  # type: ignore[name-defined]
        """Operator → test → ``{"status": "xfail" | "skip" | "xsuccess", "comment": ...}``, kept in a JSON file."""

        @staticmethod
        def load(path: str | os.PathLike[str], *, create_file: bool = False) -> FailuresDict:
            if create_file and not Path(path).exists():
                FailuresDict(path, {}).save()
            return FailuresDict(path, read(path).data)

        def set_status(self, qualname: str, *args: Any, **kwargs: Any) -> None:
            super().set_status(qualname, *args, **kwargs)
            if not self.data[qualname]:
                del self.data[qualname]

    module.generate_repro, module.FailuresDict = generate_repro, FailuresDict
    return module


class _ThreadFlag(threading.local):
    value = False


def _make_tester(name: str) -> Callable[..., None]:
    def run(op: Any, args: Any, kwargs: Any, *, copy_inputs: bool = True) -> None:
        """Run the check. Args: the operator and its arguments; ``copy_inputs`` is torch's:
        inputs are always copied.
        Raises: what the check raises."""
        call = Call(tuple(args), dict(kwargs))
        if not is_abstract(call):
            run_check(name, op, call)

    return run


def generate_opcheck_tests(
    testcase: Any,
    namespaces: Sequence[str],
    failures_dict_path: str | None = None,
    additional_decorators: dict[str, Sequence[Callable[[Any], Any]]] | None = None,
    test_utils: Sequence[str] = DEFAULT_TEST_UTILS,
) -> None:
    """Add ``{check}__{test}`` to ``testcase`` for each of its tests and each check.

    The new test runs the old one and applies the check to every call of an operator in ``namespaces``.
    Operators known to fail are listed in a file (by default ``failures_dict.json`` next to the caller);
    ``test_pt2_compliant_tag_{op}`` tests report such operators that carry the compliance tag.

    Args:
        testcase: a ``unittest.TestCase`` class; tests are added to it.
        namespaces: the namespaces whose operators are checked.
        failures_dict_path: the file of operators known to fail.
        additional_decorators: decorators by the name of a generated test.
        test_utils: names of the checks.

    Raises:
        OpCheckError: the file has invalid entries, or a generated name is taken.
        FileNotFoundError: the file does not exist.
    """
    if failures_dict_path is None:
        caller = sys._getframe(1).f_code.co_filename
        failures_dict_path = os.path.join(os.path.dirname(os.path.abspath(caller)), "failures_dict.json")
    generate = patched_optests().generate_opcheck_tests
    try:
        generate(testcase, list(namespaces), failures_dict_path, additional_decorators, list(test_utils))
    except (RuntimeError, AssertionError) as error:
        raise OpCheckError(str(error)) from error
