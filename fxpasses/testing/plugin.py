"""A pytest plugin for the authors of passes: the fixture ``prove_pass``.

::

    def test_my_pass(prove_pass):
        prove_pass(MyPass())

It is there wherever fxpasses is installed; ``-p no:fxpasses`` leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def prove_pass() -> Callable[..., Any]:
    """Proves a pass as :func:`fxpasses.testing.prove` does, and fails the test with the sites that are wrong, or that nothing proves.

    Returns:
        A function of the arguments of ``prove``; it returns the proof.
    """
    # Here, so that pytest does not import torch for those who do not use it.
    from fxpasses.testing import prove

    def run(item: Any, *arguments: Any, **keywords: Any) -> Any:
        proof = prove(item, *arguments, **keywords)
        proof.raise_if_wrong()
        open_sites = [str(site) for site in proof.sites if site.said == "UNPROVED"]
        if open_sites:
            pytest.fail(f"pass {proof.name!r} is not proved:\n" + "\n".join(open_sites), pytrace=False)
        return proof

    return run
