"""The architecture page is what the code is, and the floors hold."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_spec = importlib.util.spec_from_file_location("architecture", ROOT / "docs/architecture.py")
architecture = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(architecture)


@pytest.mark.slow
def test_the_page_is_drawn_from_the_code(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["architecture.py", "--check"])
    architecture.main()
    behind = tmp_path / "architecture.md"
    behind.write_text(architecture.PAGE.read_text().replace("pass_manager", "manager"))
    monkeypatch.setattr(architecture, "PAGE", behind)
    with pytest.raises(SystemExit, match="is not what the code is"):
        architecture.main()


@pytest.mark.slow
def test_packages_import_downwards():
    may = {"fake": set(), "compiled_autograd": {"fake"}, "fxpasses": {"fake", "compiled_autograd"}}
    edges = [(a.split("/")[0], b.split("/")[0]) for a, b in architecture.folders().edges]
    assert {("fxpasses", "compiled_autograd"), ("compiled_autograd", "fake")} <= set(edges)
    assert [(a, b) for a, b in edges if a != b and b not in may[a]] == []
