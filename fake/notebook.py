"""HTML for notebooks: some text, then a table. Everything is escaped, so user text is never markup."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def as_html(
    text: str, head: Sequence[str] = (), rows: Iterable[Sequence[object]] = (), code: str = ""
) -> str:
    """Build the HTML that ``_repr_html_`` returns.

    Args:
        text: the text above the table; line breaks are kept.
        head: the column headers.
        rows: the cells.
        code: code below the table, collapsed.

    >>> as_html("a < b", ["x"], [[1]])
    '<p style="white-space: pre-wrap">a &lt; b</p><table><tr><th>x</th></tr><tr><td style="text-align: left">1</td></tr></table>'
    """
    parts = [f'<p style="white-space: pre-wrap">{html.escape(text)}</p>']
    lines = [
        "".join(f'<td style="text-align: left">{html.escape(str(cell))}</td>' for cell in row) for row in rows
    ]
    if lines:
        lines.insert(0, "".join(f"<th>{html.escape(name)}</th>" for name in head))
        parts.append(f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>")
    if code:
        parts.append(f"<details><summary>code</summary><pre>{html.escape(code)}</pre></details>")
    return "".join(parts)
