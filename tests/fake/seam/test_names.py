"""Private names of torch are written in seam files, each in one of them, and each for somebody."""

import ast
from collections import defaultdict
from pathlib import Path

from fake.seam.missing import PACKAGES, is_seam

ROOT = Path(__file__).resolve().parents[3]
TREES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
        path.read_text()
    )
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
}


def imported(tree):
    """What the names of a file stand for that it imports: ``_C`` for ``torch._C``."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
    return found


def chains(tree):
    """The longest chains of attributes, from what a file imports on, and what it imports."""
    names, inner = imported(tree), set()
    yield from names.values()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node not in inner:
            inner.update(part for part in ast.walk(node) if isinstance(part, ast.Attribute))
            first, *parts = ast.unparse(node).split(".")
            yield ".".join((names.get(first, first), *parts))


def private_names(tree):
    for name in chains(tree):
        first, *parts = name.split(".")
        if first == "torch" and any(part.startswith("_") and not part.startswith("__") for part in parts):
            yield name


def test_each_private_name_is_written_in_one_seam_file():
    files = defaultdict(set)
    for module, tree in TREES.items():
        for name in private_names(tree):
            files[name].add(module)
    assert len(files) > 250
    assert {name: modules for name, modules in files.items() if not all(map(is_seam, modules))} == {}
    # torch._C is the module in which functions are replaced, besides what is in it
    assert {name: modules for name, modules in files.items() if len(modules) > 1 and name != "torch._C"} == {}


def test_each_name_of_a_seam_file_is_used():
    used = {name for tree in TREES.values() for name in chains(tree)}
    reached = {".".join(name.split(".")[:length]) for name in used for length in range(2, 6)}
    # as attributes of a module that another one hands on: ``_torch.pytree.tree_flatten``
    others = (name for module, tree in TREES.items() if not is_seam(module) for name in chains(tree))
    attributes = {name.split(".")[-1] for name in others if "." in name and not name.startswith("torch.")}
    unused = []
    for module in filter(is_seam, TREES):
        body = TREES[module].body
        bound = [
            alias.asname or alias.name
            for node in body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        ]
        bound += [
            t.id
            for node in body
            if isinstance(node, ast.Assign)
            for t in node.targets
            if isinstance(t, ast.Name)
        ]
        own = {
            n.id for n in ast.walk(TREES[module]) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
        }
        for name in {*bound} - own - {"annotations"}:
            if f"{module}.{name}" not in reached and name not in attributes:
                unused.append(f"{module}.{name}")
    assert unused == []
