"""For authors of passes: decide in exact arithmetic whether a rewrite is right, at each match site."""

from typing import TYPE_CHECKING

from fake.seam.lazy import lazy_names

if TYPE_CHECKING:  # otherwise lazy, because pytest imports the plugin wherever fxpasses is installed
    from fxpasses.testing.proof import NoSiteError, PassProof, SiteProof, WrongPassError, prove

__all__ = ["NoSiteError", "PassProof", "SiteProof", "WrongPassError", "prove"]

__getattr__, __dir__ = lazy_names(__name__)
