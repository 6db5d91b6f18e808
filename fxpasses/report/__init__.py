"""Readable files of what was captured and what the passes did to it."""

from fxpasses.report.files import GraphFiles, annotated_code

__all__ = ["GraphFiles", "annotated_code"]
