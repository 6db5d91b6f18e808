"""Private names of torch are written in seam files, and each in one of them."""

import ast
from collections import defaultdict
from pathlib import Path

from fake.seam.missing import PACKAGES, is_seam

ROOT = Path(__file__).resolve().parents[3]


def private_names(tree):
    """Imports of private names, and the longest chains of attributes from ``torch`` on that have one."""
    inner = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            before = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            found = [before + alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and node not in inner:
            inner.update(part for part in ast.walk(node) if isinstance(part, ast.Attribute))
            found = [ast.unparse(node)]
        else:
            continue
        for name in found:
            first, *parts = name.split(".")
            if first == "torch" and any(part.startswith("_") and not part.startswith("__") for part in parts):
                yield name


def test_each_private_name_is_written_in_one_seam_file():
    files = defaultdict(set)
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            for name in private_names(ast.parse(path.read_text())):
                files[name].add(module)
    assert len(files) > 250
    assert {name: modules for name, modules in files.items() if not all(map(is_seam, modules))} == {}
    # torch._C is the module in which functions are replaced, besides what is in it
    assert {name: modules for name, modules in files.items() if len(modules) > 1 and name != "torch._C"} == {}
