"""``fxpasses doctor``: which parts of this package work with this machine and torch, and why others don't."""

from fxpasses.doctor.health import Finding, examine
from fxpasses.doctor.seam import SeamReport, check_seam

__all__ = ["Finding", "SeamReport", "check_seam", "examine"]
