"""`opcheck` and `generate_opcheck_tests`: check that an operator is registered correctly.

One check per file: `schema_check`, `autograd_registration`, `fake_kernel`, `fake_variations`, `fake_device`,
`kernel_variations`, `uninitialized`, `functionalization`, `aot_dispatch`, `backward_formula`, `vmap`.
`runner` runs them, and `generate` generates tests from a test case.
"""

from typing import Any

from fake.library.errors import OpCheckError
from fake.library.opcheck.generate import generate_opcheck_tests, patched_optests
from fake.library.opcheck.result import CheckFailure, Evidence, Passed, Verdict
from fake.library.opcheck.runner import ALL_TEST_UTILS, DEFAULT_TEST_UTILS, opcheck
from fake.seam import library as _torch

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


_GENERATOR = {
    "FailuresDict": "FailuresDict",
    "OpCheckMode": "OpCheckMode",
    "dont_generate_opcheck_tests": "dontGenerateOpCheckTests",
    "generate_repro": "generate_repro",
    "is_inside_opcheck_mode": "is_inside_opcheck_mode",
    "validate_failures_dict_formatting": "validate_failures_dict_formatting",
    "validate_failures_dict_structure": "validate_failures_dict_structure",
}


def __getattr__(name: str) -> Any:
    """Return torch's checks as functions, or parts of its test generator; lazily, as they import Dynamo."""
    if name in _GENERATOR:
        return getattr(patched_optests(), _GENERATOR[name])
    if name in ("aot_autograd_check", "assert_raises_regex", "autograd_registration_check", "fake_check"):
        return _torch.optest(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
