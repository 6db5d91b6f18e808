"""``fxpasses doctor``: reports which features work on this machine and torch, and why others do not."""

from fxpasses.doctor.health import Finding, examine
from fxpasses.doctor.seam import SeamReport, check_seam

__all__ = ["Finding", "SeamReport", "check_seam", "examine"]
