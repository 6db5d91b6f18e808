"""For the authors of passes: is a rewrite right, decided in exact arithmetic at each of its match sites."""

from fxpasses.testing.proof import NoSiteError, PassProof, SiteProof, WrongPassError, prove

__all__ = ["NoSiteError", "PassProof", "SiteProof", "WrongPassError", "prove"]
