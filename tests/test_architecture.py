"""The architecture page is what the code is, and the floors hold."""

import importlib.util
from pathlib import Path

import networkx as nx
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


@pytest.mark.slow
def test_folders_inside_a_folder_import_downwards():
    """In a folder that has folders, each file beside them is a floor of its own."""

    def floor(module):
        path = architecture.ROOT.joinpath(*module.split("."))
        while not (path.is_dir() or path.with_suffix(".py").exists()):
            path = path.parent
        if path.is_dir() or not any(path.parent.glob("*/__init__.py")):
            path = path if path.is_dir() else path.parent
        return path.relative_to(architecture.ROOT).as_posix()

    graph = nx.DiGraph()
    for path in (path for package in architecture.PACKAGES for path in (ROOT / package).rglob("*.py")):
        if path.name != "__init__.py":
            here = floor(".".join(path.relative_to(ROOT).with_suffix("").parts))
            names = (
                name for name in architecture.imports(path) if name.split(".")[0] in architecture.PACKAGES
            )
            graph.add_edges_from((here, floor(name)) for name in names)
    graph.remove_edges_from([(here, there) for here, there in graph.edges if here.startswith(there)])
    assert ("fxpasses/checking/critical", "fxpasses/checking/comparison") in graph.edges
    assert [part for part in nx.strongly_connected_components(graph) if len(part) > 1] == []


def test_no_file_is_over_five_hundred_lines():
    sources = [path for folder in (*architecture.PACKAGES, "tests") for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 500
    assert [path.name for path in sources if len(path.read_text().splitlines()) > 500] == []
