"""Every Python example of README and the docs runs, page by page."""

import doctest
import importlib.util
import inspect
import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch

import compiled_autograd
import fake
import fxpasses

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "pages").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def examples(page):
    return BLOCK.findall(page.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if examples(p)], ids=lambda p: p.stem)
def test_examples_run(page, tmp_path, monkeypatch):
    torch._dynamo.reset()
    compiled_autograd.reset()
    # A file, so that source code and line numbers can be found as in a user's script.
    script = tmp_path / f"{page.stem.replace('-', '_')}_examples.py"
    script.write_text("\n\n".join(examples(page)))
    module = types.ModuleType("examples")
    monkeypatch.setitem(sys.modules, "examples", module)  # where Dynamo looks for what functions name
    exec(compile(script.read_text(), str(script), "exec"), vars(module))


def test_the_files_that_pages_name_exist():
    path = r"`((?:fxpasses|fake|compiled_autograd|tests|benchmarks|docs)/[\w./-]*)`"
    named = {name for page in PAGES for name in re.findall(path, page.read_text())}
    assert len(named) > 40
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_readme_has_one_command_to_run_and_one_to_test():
    text = (ROOT / "README.md").read_text()
    for name in ("demo", "test"):
        command = re.search(rf"<!-- command: {name} -->\n```bash\n(.*?)```", text, re.DOTALL).group(1).strip()
        assert "\n" not in command
        assert "-c constraints.txt" in command


def test_the_chart_is_drawn_from_the_figures():
    from benchmarks import charts

    assert charts.main(["--check"]) == 0
    names = {path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")}
    figures = json.loads((ROOT / "benchmarks" / "figures.json").read_text())
    assert {bar["how"].split()[0] for bar in figures["bars"]} <= names


def test_the_reference_shows_no_roles_and_no_double_colons():
    pytest.importorskip("griffe", reason="needs the extra 'docs'")
    spec = importlib.util.spec_from_file_location("docstrings", ROOT / "docs" / "docstrings.py")
    docstrings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(docstrings)
    assert doctest.testmod(docstrings).failed == 0
    shown = {
        item: docstrings.as_markdown(inspect.getdoc(item) or "")
        for package in (fake, compiled_autograd, fxpasses, fxpasses.passes)
        for item in (getattr(package, name) for name in package.__all__)
        if callable(item)
    }
    assert "```python" in shown[fxpasses.passes.FoldConstants]
    assert [item for item, text in shown.items() if re.search(r":\w+:`|\w::\n", text)] == []
