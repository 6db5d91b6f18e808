"""Imported first: ``fake`` and ``compiled_autograd`` have to be the packages that come with this one.

Their names are ordinary words, and Python looks beside the user's script before it looks among what is installed.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from fxpasses.errors import ShadowedPackageError

__all__ = ["check_companions"]


def check_companions() -> None:
    """Find out what ``import fake`` and ``import compiled_autograd`` give, without importing either.

    Raises:
        ShadowedPackageError: when it is a file of somebody else.
    """
    for name in ("compiled_autograd", "fake"):
        ours = Path(__file__).resolve().parent.parent / name / "__init__.py"
        loaded = sys.modules.get(name)
        spec = importlib.util.find_spec(name) if loaded is None else None
        found = getattr(loaded, "__file__", None) or getattr(spec, "origin", None)
        if ours.is_file() and (found is None or Path(found).resolve() != ours):
            raise ShadowedPackageError(name, found or repr(loaded or spec), str(ours.parent))


check_companions()

import fake.seam.missing  # noqa: E402, F401  (before the first file of this package that uses private names)
