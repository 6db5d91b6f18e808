"""Draws the part of the architecture page that follows from the code: which folder imports which, and what each is for.

``python docs/architecture.py`` writes it into ``docs/pages/architecture.md``; ``--check`` only compares, and exits with 1 where the page
is out of date, a folder says nothing about itself, or folders import each other in a circle.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "pages" / "figures"
PAGE = ROOT / "docs/pages/architecture.md"
PACKAGES = ("fake", "compiled_autograd", "fxpasses")
BEGIN, END = "<!-- drawn by docs/architecture.py: begin -->", "<!-- drawn by docs/architecture.py: end -->"


def folder_of(module: str) -> str:
    """The folder that a module is shown in: the first one below its package (``fake.library.opcheck.api``: ``fake/library``)."""
    package, *rest = module.split(".")
    inside = bool(rest) and (ROOT / package / rest[0]).is_dir()
    return f"{package}/{rest[0]}" if inside else package


@functools.cache
def imports(path: Path) -> list[str]:
    """Returns the names of the modules of ours that a file imports, wherever in the file."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            # "from package import name": the name may be a module.
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


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


FLOW = [
    ("your model", "Dynamo graph", "torch.compile"),
    ("Dynamo graph", "regions", "repeated layers, each kind once"),
    ("regions", "joint graph", "functionalize, trace both directions"),
    ("regions", "inference graph", "no gradients needed"),
    ("joint graph", "rewritten joint graph", "joint passes"),
    ("rewritten joint graph", "forward graph", "minimum cut"),
    ("rewritten joint graph", "backward graph", "memory budget"),
    ("forward graph", "Inductor", "forward passes"),
    ("backward graph", "Inductor", "backward passes"),
    ("inference graph", "Inductor", "inference passes"),
    ("loss.backward() in eager", "whole backward graph", "compiled_autograd: engine hook"),
    ("whole backward graph", "Inductor", ""),
    ("Inductor", "compiled forward and backward", ""),
]
"""What becomes what, and how."""


def picture(edges: Sequence[tuple[str, str, str]], alone: Iterable[str] = (), gap: int = 46) -> str:
    """Returns a drawing of boxes in layers, each below all that lead to it, as SVG.

    Args:
        edges: from, to, and what is written beside the line.
        alone: boxes that no line may lead to.
        gap: between layers.
    """
    graph = nx.DiGraph()
    graph.add_nodes_from(alone)
    graph.add_edges_from((a, b, {"text": text}) for a, b, text in edges)
    place: dict[str, tuple[float, float]] = {}
    widths = {name: 7.4 * len(name) + 20 for name in graph}
    rooms = dict(widths)  # with what is written at the lines
    for a, b, text in edges:
        at = a if graph.out_degree(a) == 1 else b
        rooms[at] = max(rooms[at], 6 * len(text) + 10)
    for number, layer in enumerate(nx.topological_generations(graph)):
        above = {
            name: [place[other][0] for other in graph.predecessors(name)] or [0.0] for name in sorted(layer)
        }
        order = sorted(above, key=lambda name: sum(above[name]) / len(above[name]))
        left = -sum(rooms[name] + 40 for name in order) / 2
        for name in order:
            # To a thousandth: Python 3.12 adds floats in another way, and half a pixel is rounded below.
            place[name] = round(left + rooms[name] / 2 + 20, 3), number * (30 + gap)
            left += rooms[name] + 40
    low = min(x - rooms[name] / 2 for name, (x, _) in place.items()) - 10
    width = max(x + rooms[name] / 2 for name, (x, _) in place.items()) + 10 - low
    height = max(y for _, y in place.values()) + 50
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{low:.0f} -10 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" font-family="system-ui, sans-serif" font-size="13" role="img">',
        "<style>text { fill: #222; text-anchor: middle } .how { fill: #666; font-size: 11px } rect { fill: #eef3f9; stroke: #7a9cc4 } "
        "path { fill: none; stroke: #999 } @media (prefers-color-scheme: dark) { text { fill: #eee } .how { fill: #aaa } rect { fill: #22303f } }</style>",
    ]
    texts = []
    for a, b, data in graph.edges(data=True):
        (x, y), (u, v) = place[a], place[b]
        lines.append(
            f'<path d="M{x:.0f} {y + 30:.0f} C{x:.0f} {y + 30 + gap:.0f} {u:.0f} {v - gap:.0f} {u:.0f} {v:.0f}"/>'
        )
        at = (x, y + 30 + gap / 3) if graph.out_degree(a) == 1 else (u, v - gap / 6)
        texts.append(f'<text class="how" x="{at[0]:.0f}" y="{at[1]:.0f}">{data["text"]}</text>')
    for name, (x, y) in place.items():
        lines.append(
            f'<rect x="{x - widths[name] / 2:.0f}" y="{y:.0f}" width="{widths[name]:.0f}" height="30" rx="6"/>'
        )
        texts.append(f'<text x="{x:.0f}" y="{y + 20:.0f}">{name}</text>')
    return "\n".join([*lines, *texts, "</svg>", ""])


def pictures() -> dict[str, str]:
    """Returns the drawings by the names of their files: the flow, and for each package its folders; an arrow that follows from others is left out."""
    found, graph = {"flow.svg": picture(FLOW)}, folders()
    for package in PACKAGES:
        inside = graph.subgraph(name for name in graph if name.startswith(f"{package}/"))
        edges = [
            (a.partition("/")[2], b.partition("/")[2], "")
            for a, b in sorted(nx.transitive_reduction(inside).edges)
        ]
        found[f"{package}.svg"] = picture(edges, sorted(name.partition("/")[2] for name in inside), gap=60)
    return found


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
        f"{BEGIN}\nEach folder imports only folders below it that a line leads to, directly or through others. The files in a package's root are its "
        "doors: what a user calls, errors, counters."
    ]
    for package in reversed(PACKAGES):
        rows = [name for name in sorted(graph) if name.split("/")[0] == package]
        parts.append(
            f"## {package}\n\n![folders of {package}](figures/{package}.svg)\n\n| folder | what it holds |\n|---|---|"
        )
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
    wanted = {PAGE: before + drawn() + after} | {FIGURES / name: text for name, text in pictures().items()}
    if "--check" not in sys.argv[1:]:
        for file, text in wanted.items():
            file.write_text(text)
    elif any(not file.exists() or file.read_text() != text for file, text in wanted.items()):
        sys.exit("docs/pages/architecture.md is not what the code is: run 'python docs/architecture.py'")


if __name__ == "__main__":
    main()
