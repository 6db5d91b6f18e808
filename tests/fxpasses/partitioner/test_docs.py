"""The examples in the documentation run."""

import doctest
import re
from pathlib import Path

import torch

from fxpasses.partitioner import inductor

PAGE = Path(__file__).parents[3] / "docs" / "partition.md"


def test_examples_of_the_page_run() -> None:
    torch._dynamo.reset()
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)


def test_docstring_examples_run() -> None:
    assert doctest.testmod(inductor).failed == 0
