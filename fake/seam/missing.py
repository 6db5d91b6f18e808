"""On an unknown release of torch, a missing private name disables what needs it, and nothing else.

The seam files (``fake/seam``, ``_torch*.py``) are where private names are used. On an unknown release this
module's loader reads them: a statement that fails because torch lacks a name binds a stand-in instead, which
raises when it is called. On a known release none of this happens.
"""

from __future__ import annotations

import ast
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from importlib import import_module
from typing import Any, ClassVar

PACKAGES = ("fake", "compiled_autograd", "fxpasses")
_WITHOUT_TORCH = ("lazy", "missing", "patches")
"""Modules of ``fake.seam`` that use no private name: they are needed before the first file that does."""
_missing: dict[str, str] = {}


class MissingTorchNameError(ImportError):
    """Code needs a private name that this release of torch does not have.

    Attributes:
        name: the name, as written in the seam file.
        file: the module that needs it.
    """

    def __init__(self, name: str, file: str) -> None:
        torch = import_module("torch")
        super().__init__(
            f"torch {torch.__version__} has no {name}, which {file} needs for this. Install a release that is known "
            "(constraints.txt and constraints-2.15.txt name two); `python -m fxpasses doctor --torch` lists what is missing."
        )
        self.name, self.file = name, file


def is_seam(module: str) -> bool:
    """Return whether a module of the three packages may use private names of torch.

    >>> from fake.seam.missing import is_seam
    >>> is_seam("fake.seam.dispatch"), is_seam("fxpasses.dynamo._torch"), is_seam("fake.mode")
    (True, True, False)
    """
    folder, _, name = module.rpartition(".")
    return (folder == "fake.seam" and name not in _WITHOUT_TORCH) or (
        module.partition(".")[0] in PACKAGES and name.startswith("_torch")
    )


def missing_names() -> list[str]:
    """Return the names that the loaded seam files need and torch lacks."""
    return sorted(_missing)


def tolerate_missing_names() -> None:
    """Load seam files this way from now on, if the release is unknown;
    called before the first of them is imported.

    This does not import torch: the first of these files does,
    and code that needs none of them works without torch.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Missing(type):
    """Metaclass of stand-ins: ``isinstance``, ``except`` and unions accept them,
    and nothing is an instance."""

    file: ClassVar[str]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise MissingTorchNameError(cls.__name__, cls.file)

    __iter__ = __call__

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stand_in(f"{cls.__name__}.{name}", cls.file)


def _stand_in(name: str, file: str) -> Any:
    return _Missing(name, (Exception,), {"file": file, "__module__": __name__})


def _bind_stand_in(name: str, file: str, error: Exception) -> Any:
    """Return the stand-in to bind in place of a name; the error says which name torch lacks."""
    _missing.setdefault(name, str(error))
    return _stand_in(name, file)


class _Finder:
    """Finds the seam files of the three packages."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return Python's spec with a loader that tolerates missing names. Args: as for any finder."""
        if not is_seam(fullname):
            return None
        if import_module("fake.seam.patches").is_known_version():
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Runs the statements of a file one by one; the compiled code is not cached."""

    def get_code(self, fullname: str) -> types.CodeType:
        """Return the code of the file, with each statement guarded separately."""
        tree = ast.parse(self.get_data(self.path), self.path)
        tree.body = [part for statement in tree.body for part in _wrap_in_try(statement, fullname)]
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the module, with the names that the guards need."""
        module.__dict__.update(_bind_stand_in=_bind_stand_in, _CANNOT=(ImportError, AttributeError))
        super().exec_module(module)


def _wrap_in_try(statement: ast.stmt, file: str) -> list[ast.stmt]:
    """Wrap a statement of a module in ``try``, so that the names it binds are bound in any case."""
    if isinstance(statement, ast.ImportFrom):
        if statement.module == "__future__":
            return [statement]
        parts: list[ast.stmt] = [
            ast.ImportFrom(module=statement.module, names=[alias], level=statement.level)
            for alias in statement.names
        ]
        names = [f"{statement.module}.{alias.name}" for alias in statement.names]
        bound = [[alias.asname or alias.name] for alias in statement.names]
    else:
        parts, bound = [statement], [_bound_names(statement)]
        names = [ast.unparse(statement.value)] if isinstance(statement, ast.Assign) else [""]
    return [_try_statement(*parts, file=file) for parts in zip(parts, names, bound, strict=True)]


def _bound_names(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Import):
        return [alias.asname or alias.name.partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    return [n.id for target in targets if target for n in ast.walk(target) if isinstance(n, ast.Name)]


def _try_statement(statement: ast.stmt, name: str, bound: list[str], *, file: str) -> ast.stmt:
    if not bound:
        return statement
    lines = "\n".join(f"    {n} = _bind_stand_in({(name or n)!r}, {file!r}, _error)" for n in bound)
    guarded = ast.parse(f"try:\n    pass\nexcept _CANNOT as _error:\n{lines}").body[0]
    assert isinstance(guarded, ast.Try)
    guarded.body = [statement]
    return guarded


tolerate_missing_names()
