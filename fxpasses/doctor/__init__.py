"""``python -m fxpasses doctor``: what is in force on this machine and this torch, and what is not, and why."""

from fxpasses.doctor.health import Finding, examine
from fxpasses.doctor.seam import SeamReport, check_seam

__all__ = ["Finding", "SeamReport", "check_seam", "examine"]
