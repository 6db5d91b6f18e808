"""Lazy packages: names are imported on first access, so ``import package`` costs next to nothing.

The package lists its imports once, where type checkers read them::

    if TYPE_CHECKING:
        from package.module import name

    __getattr__, __dir__ = lazy_names(__name__)

>>> import sys, types
>>> package = types.ModuleType("package")
>>> sys.modules["package"] = package
>>> package.__getattr__, package.__dir__ = lazy_names("package", "if TYPE_CHECKING:\\n    from math import tau as circle")
>>> round(package.circle, 2), "circle" in dir(package)
(6.28, True)
>>> del sys.modules["package"]
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import linecache
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(
    package: str, source: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package,
    for its imports under ``if TYPE_CHECKING`` and its submodules.

    Args:
        package: the package's name; it is being imported.
        source: its source text; by default read from its file.
    """
    module = sys.modules[package]

    @functools.cache
    def lazy_imports() -> dict[str, tuple[str, str]]:
        # Not the loader's own text: pytest's loader, which rewrites assertions in plugins and packages
        # installed with them, has none.
        text = "".join(linecache.getlines(str(module.__file__), vars(module))) if source is None else source
        assert text, f"the source of {package} is not there"
        return {
            alias.asname or alias.name: (str(statement.module), alias.name)
            for block in ast.parse(text).body
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
            for statement in block.body
            if isinstance(statement, ast.ImportFrom)
            for alias in statement.names
        }

    def get(name: str) -> Any:
        if name in lazy_imports():
            module_name, original = lazy_imports()[name]
            value = getattr(importlib.import_module(module_name), original)
        elif not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}") is not None:
            return importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=module)
        setattr(module, name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(module), *lazy_imports()})

    return get, names
