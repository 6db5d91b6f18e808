"""Docstrings as the reference shows them: roles become links, and what follows ``::`` a block of code."""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["AsMarkdown", "as_markdown"]

_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc):`(~?)([^`<]+)`")


class AsMarkdown(griffe.Extension):
    """Rewrites every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object with a docstring, or without."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """A docstring's roles as code, and its literal blocks as Markdown's.

    >>> print(as_markdown("See :func:`~fake.explain`. Before::\\n\\n    x = 1\\n\\nAfter."))
    See `explain`. Before:
    <BLANKLINE>
    ```python
    x = 1
    ```
    <BLANKLINE>
    After.
    """
    text = _ROLE.sub(lambda role: f"`{role[2].rpartition('.')[2] if role[1] else role[2]}`", text)
    lines, made = text.split("\n"), []
    while lines:
        line = lines.pop(0)
        if not line.rstrip().endswith("::"):
            made.append(line)
            continue
        head = line.rstrip()[:-1]
        block = []
        outer = len(line) - len(line.lstrip())
        while lines and (not lines[0].strip() or len(lines[0]) - len(lines[0].lstrip()) > outer):
            block.append(lines.pop(0))
        if not any(part.strip() for part in block):
            made += [line, *block]
            continue
        while not block[0].strip():
            block.pop(0)
        while not block[-1].strip():
            block.pop()
        inner = min(len(part) - len(part.lstrip()) for part in block if part.strip())
        margin = " " * outer
        made += [head] if head.strip() != ":" else []
        made += ["", f"{margin}```python", *(margin + part[inner:] for part in block), f"{margin}```", ""]
    return "\n".join(made)
