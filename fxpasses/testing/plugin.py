"""A pytest plugin for authors of passes, with the fixture ``prove_pass``.

::

    def test_my_pass(prove_pass):
        prove_pass(MyPass())

It is available wherever fxpasses is installed. ``-p no:fxpasses`` turns it off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def prove_pass() -> Callable[..., Any]:
    """Prove a pass as :func:`fxpasses.testing.prove` does, and fail the test if a site is wrong or unproved.

    Returns:
        A function with the arguments of ``prove``; it returns the proof.
    """
    # Import here, so that pytest does not import torch unless a test uses the fixture.
    from fxpasses.testing import prove

    def run(item: Any, *arguments: Any, **keywords: Any) -> Any:
        proof = prove(item, *arguments, **keywords)
        proof.raise_if_wrong()
        open_sites = [str(site) for site in proof.sites if site.said == "UNPROVED"]
        if open_sites:
            pytest.fail(f"pass {proof.name!r} is not proved:\n" + "\n".join(open_sites), pytrace=False)
        return proof

    return run
