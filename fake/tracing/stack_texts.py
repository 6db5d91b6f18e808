"""The text of a line of code in a stack trace, made once.

Dynamo keeps with each operator the text of the stack that called it. Python parses each line for it, to underline what is
running; in a model of equal layers, and within a layer, the lines are the same again and again.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from fake.seam.patches import LEDGER, Patch, When


def _remembering(original: Callable[..., str]) -> Callable[..., str]:
    texts: dict[tuple[Any, ...], str] = {}

    def format_frame_summary(self: Any, frame: traceback.FrameSummary, **options: Any) -> str:
        if frame.locals or options:
            return original(self, frame, **options)
        # the line is read from the file that is there now: a notebook may have another text under the same name
        key = (
            frame.filename, frame.lineno, frame.end_lineno, frame.colno, frame.end_colno, frame.name, frame.line,
        )  # fmt: skip
        text = texts.get(key)
        if text is None:
            text = texts[key] = original(self, frame)
        return text

    return format_frame_summary


PATCHES = LEDGER.add(
    Patch(
        traceback.StackSummary,
        "format_frame_summary",
        _remembering,
        when=When.COMPILATION,
        versions=None,
        lost="time: each line of code is parsed for each operator that it calls",
    )
)
