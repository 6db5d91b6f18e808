"""Imported first: checks that ``import fake`` is the package shipped here (see ``fxpasses._companions``)."""

import importlib.util
import sys
from pathlib import Path

_ours = Path(__file__).resolve().parent.parent / "fake" / "__init__.py"
_loaded = sys.modules.get("fake")
_spec = importlib.util.find_spec("fake") if _loaded is None else None
_found = getattr(_loaded, "__file__", None) or getattr(_spec, "origin", None)
if _ours.is_file() and (_found is None or Path(_found).resolve() != _ours):
    raise ImportError(
        f"'import fake' gives {_found or _loaded or _spec}, which shadows the package 'fake' that comes with "
        f"compiled_autograd ({_ours.parent}). Rename that file, or move it to where Python does not look for modules.",
        name="fake",
        path=_found,
    )

import fake.seam.missing  # noqa: E402, F401  (before the first file of this package that uses private names)
