"""`opcheck` and `generate_opcheck_tests`: is an operator registered correctly?

One check a file: `schema`, `autograd_registration`, `fake_kernel`, `fake_variations`, `uninitialized`,
`functionalization`, `aot_dispatch`, `gradients`. `runner` runs them, `generate` turns a test case into checks.
"""

from typing import Any

from fake.library import _torch
from fake.library.errors import OpCheckError
from fake.library.opcheck.failures import FailuresDict, validate_failures_dict_structure
from fake.library.opcheck.generate import (
    OpCheckMode,
    dont_generate_opcheck_tests,
    generate_opcheck_tests,
    is_inside_opcheck_mode,
)
from fake.library.opcheck.repro import generate_repro
from fake.library.opcheck.result import CheckFailure, Evidence, Passed, Verdict
from fake.library.opcheck.runner import ALL_TEST_UTILS, DEFAULT_TEST_UTILS, opcheck

__all__ = [
    "ALL_TEST_UTILS",
    "DEFAULT_TEST_UTILS",
    "CheckFailure",
    "Evidence",
    "FailuresDict",
    "OpCheckError",
    "OpCheckMode",
    "Passed",
    "Verdict",
    "aot_autograd_check",
    "assert_raises_regex",
    "autograd_registration_check",
    "dont_generate_opcheck_tests",
    "fake_check",
    "generate_opcheck_tests",
    "generate_repro",
    "is_inside_opcheck_mode",
    "opcheck",
    "validate_failures_dict_structure",
]


def __getattr__(name: str) -> Any:
    """torch's checks as functions of their own, for tests that call them directly: they import Dynamo."""
    if name in ("aot_autograd_check", "assert_raises_regex", "autograd_registration_check", "fake_check"):
        return _torch.optest(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
