"""The examples of docs/custom-ops.md run, in order, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path


def test_examples_run():
    text = (Path(__file__).parents[3] / "docs" / "custom-ops.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 7
    namespace = {"__name__": "docs_custom_ops"}
    for block in blocks:
        exec(compile(block, "docs/custom-ops.md", "exec", dont_inherit=True), namespace)
