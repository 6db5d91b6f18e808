"""Validation of pass options."""

from __future__ import annotations

from fxpasses.errors import OptionsError
from fxpasses.pass_manager.pass_base import Pass


def require_at_least(item: Pass, **minimum: float) -> None:
    """Check numeric options: ``require_at_least(self, max_rows=1)``. An int minimum requires an integer.

    Raises:
        OptionsError: if an option is not a number, or too small; names the pass and the option.
    """
    for option, least in minimum.items():
        value = getattr(item, option)
        kinds = (int, float) if isinstance(least, float) else (int,)
        if isinstance(value, bool) or not isinstance(value, kinds) or not value >= least:
            kind = "a number" if float in kinds else "an integer"
            raise OptionsError(f"{item.name}: {option}", value, f"{kind}, at least {least}")
