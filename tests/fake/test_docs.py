"""The examples of the documentation run."""

import re
from pathlib import Path

import fake


def test_examples_run():
    text = (Path(fake.__file__).parents[1] / "docs" / "fake.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 4
    exec(compile("\n".join(blocks), "docs/fake.md", "exec"), {})
