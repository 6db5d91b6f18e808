"""opcheck finds operators that are wrong beside their sample, and says nothing of right ones."""

from __future__ import annotations

import pytest

from fake.library import opcheck
from tests.fake.library.plants import RIGHT, WRONG


@pytest.mark.parametrize("name", WRONG)
def test_wrong_operator_is_found(name):
    op, args = WRONG[name]()
    verdict = opcheck(op, args, raise_exception=False)
    assert not verdict.ok, verdict
    assert all(failure.fix for failure in verdict.failures)


@pytest.mark.parametrize("name", RIGHT)
def test_right_operator_passes(name):
    op, args = RIGHT[name]()
    verdict = opcheck(op, args, raise_exception=False)
    assert verdict.ok, verdict
