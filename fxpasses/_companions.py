"""Check that ``fake`` and ``compiled_autograd`` are the packages that ship with this one. Imported first.

Their names are ordinary words, and Python searches the user's script directory before installed packages.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from fxpasses.errors import ShadowedPackageError

__all__ = ["check_companions"]


def check_companions() -> None:
    """Check what ``import fake`` and ``import compiled_autograd`` would load, without importing either.

    Raises:
        ShadowedPackageError: if either name resolves to a file that is not ours.
    """
    for name in ("compiled_autograd", "fake"):
        ours = Path(__file__).resolve().parent.parent / name / "__init__.py"
        loaded = sys.modules.get(name)
        spec = importlib.util.find_spec(name) if loaded is None else None
        found = getattr(loaded, "__file__", None) or getattr(spec, "origin", None)
        if ours.is_file() and (found is None or Path(found).resolve() != ours):
            raise ShadowedPackageError(name, found or repr(loaded or spec), str(ours.parent))


check_companions()

import fake.seam.missing  # noqa: E402, F401  (must precede the first module here that uses private names)
