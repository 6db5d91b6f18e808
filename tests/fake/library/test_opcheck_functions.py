"""torch's checks as functions of their own."""

from __future__ import annotations

import pytest
import torch

from fake.library import scoped_library
from fake.library.opcheck import (
    aot_autograd_check,
    assert_raises_regex,
    autograd_registration_check,
    fake_check,
)
from tests.fake.library.support import NAMESPACE, overload_of


@pytest.fixture
def lib():
    with scoped_library(NAMESPACE, "FRAGMENT") as library:
        yield library


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("check_gradients", [False, "auto"])
def test_aot_autograd_check(dynamic, check_gradients):
    for function, x in (
        (lambda x: x.clone(), torch.randn(3)),
        (lambda x: x.clone(), torch.randn(3, requires_grad=True)),
        (lambda x: x.detach(), torch.randn(3, requires_grad=True)),
    ):
        aot_autograd_check(function, (x,), {}, dynamic=dynamic, check_gradients=check_gradients)


def test_autograd_registration_check(lib):
    lib.define("explicit(Tensor x) -> Tensor")
    lib.impl("explicit", lambda x: x.sin().cos(), "CompositeExplicitAutograd")
    lib.define("implicit(Tensor x) -> Tensor")
    lib.impl("implicit", lambda x: x.sin().cos(), "CompositeImplicitAutograd")
    x = torch.randn(3, requires_grad=True)
    autograd_registration_check(overload_of(f"{NAMESPACE}::implicit"), (x,), {})
    with pytest.raises(AssertionError, match="incorrectly registered"):
        autograd_registration_check(overload_of(f"{NAMESPACE}::explicit"), (x,), {})
    fake_check(torch.ops.aten.sin.default, (x,), {})


def test_assert_raises_regex():
    with assert_raises_regex(RuntimeError, "c.*"):
        raise RuntimeError("abcd")
    for pattern, error, message in (
        ("c.*", ValueError("abcd"), "instead got"),
        ("f", RuntimeError("abcd"), "to match regex"),
        ("c.*", None, "Expected exception"),
    ):
        with pytest.raises(AssertionError, match=message):
            _raise_inside(pattern, error)


def _raise_inside(pattern, error):
    with assert_raises_regex(RuntimeError, pattern):
        if error is not None:
            raise error
