"""Draws the part of the architecture page that follows from the code: which folder imports which, and what each is for.

``python docs/architecture.py`` writes it into ``docs/pages/architecture.md``; ``--check`` only compares, and exits with 1 where the page
is out of date, a folder says nothing about itself, or folders import each other in a circle.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/pages/architecture.md"
PACKAGES = ("fake", "compiled_autograd", "fxpasses")
BEGIN, END = "<!-- drawn by docs/architecture.py: begin -->", "<!-- drawn by docs/architecture.py: end -->"


def folder_of(module: str) -> str:
    """The folder that a module is shown in: the first one below its package (``fake.library.opcheck.api``: ``fake/library``)."""
    package, *rest = module.split(".")
    inside = bool(rest) and (ROOT / package / rest[0]).is_dir()
    return f"{package}/{rest[0]}" if inside else package


def imports(path: Path) -> Iterator[str]:
    """Yields the names of the modules of ours that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            # "from package import name": the name may be a module.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def folders() -> nx.DiGraph:
    """Returns the folders of all packages, with what each is for; edges lead to what is imported."""
    graph = nx.DiGraph()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            folder = folder_of(module)
            said = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) or ""
            graph.add_node(folder, said=said.partition("\n")[0])
            for name in imports(path):
                if name.split(".")[0] in PACKAGES and folder_of(name) != folder:
                    graph.add_edge(folder, folder_of(name))
    return graph


def diagram(graph: nx.DiGraph, package: str) -> str:
    """Returns a Mermaid drawing of one package's folders; an arrow that follows from others is left out."""
    inside = graph.subgraph(name for name in graph if name.startswith(f"{package}/"))
    reduced = nx.transitive_reduction(inside)
    lines = ["```mermaid", "flowchart TD"]
    lines += [f'    {name.replace("/", "_")}["{name.partition("/")[2]}"]' for name in sorted(inside)]
    lines += [f"    {a.replace('/', '_')} --> {b.replace('/', '_')}" for a, b in sorted(reduced.edges)]
    return "\n".join([*lines, "```"])


def drawn() -> str:
    """Returns what stands between the two marks of the page.

    Raises:
        SystemExit: when folders of a package import each other, or one does not say what it is for.
    """
    graph = folders()
    silent = [name for name, told in graph.nodes(data="said") if not told]
    if silent:
        sys.exit(f"folders whose __init__.py has no docstring: {', '.join(silent)}")
    # A package's root holds its doors: they import what they open, and others import errors and counters from there.
    rooms = graph.subgraph(name for name in graph if "/" in name)
    if circles := list(nx.simple_cycles(rooms)):
        sys.exit(f"folders that import each other: {' -> '.join([*circles[0], circles[0][0]])}")
    parts = [
        f"{BEGIN}\nEach folder imports only folders that an arrow leads to, directly or through others. The files in a package's root are its "
        "doors: what a user calls, errors, counters."
    ]
    for package in reversed(PACKAGES):
        rows = [name for name in sorted(graph) if name.split("/")[0] == package]
        parts.append(f"## {package}\n\n{diagram(graph, package)}\n\n| folder | what it holds |\n|---|---|")
        parts[-1] += "".join(
            f"\n| `{name}/` | {graph.nodes[name]['said'].replace('|', '&#124;')} |" for name in rows
        )
    return "\n\n".join([*parts, END])


def main() -> None:
    """Write the page, or with ``--check`` compare it."""
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        sys.exit(f"{PAGE.relative_to(ROOT)} has no lines {BEGIN!r} and {END!r}")
    wanted = before + drawn() + after
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(wanted)
    elif wanted != page:
        sys.exit("docs/pages/architecture.md is not what the code is: run 'python docs/architecture.py'")


if __name__ == "__main__":
    main()
