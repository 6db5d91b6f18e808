"""Checks that the installed torch has the names that the seam files (``fake/seam``, ``_torch*.py``) use.

There is no list to maintain: the names are read from the source. Imports, attribute chains that start at one,
and ``getattr`` with a constant name are uses. ``hasattr``, and ``getattr`` with a default, mark a name as
absent in some releases. Calls are checked against the signature of what they call, and replacements on the
ledger of patches against the signature of what they replace.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from fake.seam.missing import PACKAGES, is_seam
from fake.seam.patches import LEDGER, Entry, Patch, is_known_version

_ABSENT = object()
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Use:
    """One use of a name of torch in one file.

    Attributes:
        file: the file, relative to the packages.
        line: its line.
        name: the full name, such as ``torch._dynamo.config.suppress_errors``.
        call: the number of positional arguments and the names of the others in a call; ``None`` if it is not
            called here, or with a variable number.
        optional: whether the file first asks whether torch has it.
    """

    file: str
    line: int
    name: str
    call: tuple[int, tuple[str, ...]] | None = None
    optional: bool = False

    @property
    def location(self) -> str:
        """The file and line: ``fake/seam/dispatch.py:120``."""
        return f"{self.file}:{self.line}"


@dataclass
class SeamReport:
    """The result of the check.

    Attributes:
        names: the number of different names that each file uses.
        missing: uses of names that the installed torch does not have.
        unfit: calls that do not fit the signature, and replacements that take fewer arguments, each with the
            reason.
        absent: names that are checked for before use, and are not in this torch.
    """

    names: dict[str, int] = field(default_factory=dict)
    missing: list[Use] = field(default_factory=list)
    unfit: list[tuple[Use, str]] = field(default_factory=list)
    absent: list[Use] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing has to be ported."""
        return not self.missing and not self.unfit

    def __str__(self) -> str:
        lines = [f"{sum(self.names.values())} names of torch in {len(self.names)} files"]
        for title, found in (
            ("missing", [f"{use.location}: {use.name}" for use in self.missing]),
            ("other arguments than it takes", [f"{u.location}: {u.name}: {why}" for u, why in self.unfit]),
            (
                "not in this release, and asked for before it is used",
                sorted({f"{use.file}: {use.name}" for use in self.absent}),
            ),
        ):
            lines.append(f"{title}: {'' if found else 'none'}".rstrip())
            lines.extend(f"    {line}" for line in found)
        return "\n".join(lines)


def seam_files() -> list[Path]:
    """Return the files of the three packages that may use private names of torch."""
    return sorted(
        path
        for package in PACKAGES
        for path in (_ROOT / package).rglob("*.py")
        if is_seam(".".join(path.relative_to(_ROOT).with_suffix("").parts))
    )


def check_seam(files: Iterable[Path] | None = None, entries: Iterable[Entry] | None = None) -> SeamReport:
    """Check the names and calls of the seam files, and the ledger of patches, against the installed torch.

    Args:
        files: replaces all seam files; they are not imported.
        entries: replaces the entries of the ledger.
    """
    report = SeamReport()
    for path in seam_files() if files is None else files:
        name = path.relative_to(_ROOT).as_posix() if path.is_relative_to(_ROOT) else path.name
        uses = uses_in(path.read_text(), name)
        report.names[name] = len({use.name for use in uses})
        for use in uses:
            found = resolve(use.name)
            if found is _ABSENT:
                (report.absent if use.optional else report.missing).append(use)
            else:
                why = "" if use.call is None else _signature_problem(found, *use.call)
                if why:
                    report.unfit.append((use, why))
    for entry in LEDGER.entries if entries is None else entries:
        if isinstance(entry, Patch) and (entry.versions is None or is_known_version(entry.versions)):
            missing = ", ".join(_missing_parameters(*entry.both()))
            why = entry.problem() or (missing and f"its replacement does not take {missing}")
            if why:
                report.unfit.append((Use("ledger of patches", 0, entry.name), why))
    return report


def uses_in(source: str, file: str = "") -> list[Use]:
    """Return the names of torch in the source of one file, in order."""
    tree = ast.parse(source)
    collector = _UseCollector(file)
    collector.bind_imports(tree)
    collector.bind_assignments(tree)
    collector.visit(tree)
    optional_names = {use.name for use in collector.found if use.optional}
    found = [
        replace(use, optional=use.optional or use.name in optional_names)
        for use in dict.fromkeys(collector.found)
    ]
    return sorted(found, key=lambda use: use.line)


def resolve(name: str) -> Any:
    """Return the object behind a dotted name, or a marker if there is none. Imports modules on the way."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        inner = getattr(found, part, _ABSENT)
        if inner is _ABSENT and not isinstance(
            found, ModuleType
        ):  # a package may have a function with the name of a submodule
            inner = getattr(sys.modules.get(".".join(parts[: i - 1])), part, _ABSENT)
        if inner is _ABSENT and isinstance(found, ModuleType):
            try:
                inner = importlib.import_module(".".join(parts[:i]))
            except ModuleNotFoundError:
                return _ABSENT
        if inner is _ABSENT:
            return None if part in getattr(found, "__annotations__", {}) else _ABSENT
        found = inner
    return found


def _signature_problem(function: Any, positional: int, keywords: tuple[str, ...]) -> str:
    """Return why a function does not take these arguments, or ""."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # written in C++
        return ""
    try:
        signature.bind(*[None] * positional, **dict.fromkeys(keywords))
    except TypeError as error:
        return f"{error} in {signature}"
    return ""


def _missing_parameters(original: Any, ours: Any) -> list[str]:
    """Return the arguments of a function that its replacement does not take."""
    original, ours = getattr(original, "__func__", original), getattr(ours, "__func__", ours)
    try:
        theirs = inspect.signature(original).parameters.values()
        takes = inspect.signature(ours, follow_wrapped=False).parameters.values()
    except (ValueError, TypeError):  # not functions, or written in C++
        return []
    names, kinds = {p.name for p in takes}, {p.kind for p in takes}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return []
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    many = len(theirs) if inspect.Parameter.VAR_POSITIONAL in kinds else 0
    positional = max(many, sum(p.kind in by_position for p in takes))
    return [
        p.name
        for i, p in enumerate(theirs)
        if p.name not in names and (p.kind is p.KEYWORD_ONLY or (p.kind in by_position and i >= positional))
    ]


@functools.cache
def _names_of(module: str) -> dict[str, str]:
    """Map the names of a seam file to the names of torch that they stand for."""
    collector, tree = _UseCollector(module), ast.parse((_ROOT / f"{module.replace('.', '/')}.py").read_text())
    tree.body = [part for part in tree.body if not isinstance(part, ast.FunctionDef | ast.ClassDef | ast.If)]
    collector.bind_imports(tree)
    collector.bind_assignments(tree)
    return collector.bound


class _UseCollector(ast.NodeVisitor):
    """Collects uses. ``bound`` maps names in the file to the names of torch that they stand for."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.bound: dict[str, str] = {}
        self.found: list[Use] = []

    def bind_imports(self, tree: ast.AST) -> None:
        """Bind the imports from torch, each of which is a use, and those from other seam files."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if _is_torch(alias.name):
                        self.bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
                        self._note(node, alias.name)
            elif isinstance(node, ast.ImportFrom) and is_seam(str(node.module)):
                names = _names_of(str(node.module))
                self.bound.update({a.asname or a.name: names[a.name] for a in node.names if a.name in names})
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and _is_torch(node.module or ""):
                for alias in node.names:
                    self.bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                    self._note(node, f"{node.module}.{alias.name}")

    def bind_assignments(self, tree: ast.Module) -> None:
        """Follow ``name = torch._something`` at the top level of the file."""
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                path = self._path(node.value)
                if path is not None and len(targets) == 1 and isinstance(targets[0], ast.Name):
                    self.bound[targets[0].id] = path

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Visit a function, in which its own variables shadow the names of the file."""
        arguments = node.args
        own = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        own |= {a.arg for a in (arguments.vararg, arguments.kwarg) if a is not None}
        own |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        outer = self.bound
        for part in (*node.decorator_list, arguments, *([node.returns] if node.returns else [])):
            self.visit(part)
        self.bound = {name: path for name, path in outer.items() if name not in own}
        for statement in node.body:
            self.visit(statement)
        self.bound = outer

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self._path(node)
        if path is None:
            self.generic_visit(node)
        else:
            self._note(node, path)

    def visit_Tuple(self, node: ast.Tuple) -> None:
        """Record ``(torch._C, "_name", ...)``, which names an attribute that is swapped in and out."""
        for owner, name in zip(node.elts, node.elts[1:], strict=False):
            self._note_attribute(node, owner, name)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        asks = node.func.id if isinstance(node.func, ast.Name) else ""
        if len(node.args) >= 2 and asks in ("getattr", "hasattr"):
            optional = asks == "hasattr" or (asks == "getattr" and len(node.args) == 3)
            self._note_attribute(node, node.args[0], node.args[1], optional)
        path = self._path(node.func)
        if path is not None and not any(isinstance(a, ast.Starred) for a in node.args):
            keywords = tuple(k.arg for k in node.keywords if k.arg is not None)
            if len(keywords) == len(node.keywords):
                self._note(node, path, (len(node.args), keywords))
        self.generic_visit(node)

    def _note_attribute(self, node: ast.AST, owner: ast.AST, name: ast.AST, optional: bool = False) -> None:
        path = self._path(owner)
        attribute = name.value if isinstance(name, ast.Constant) else None
        if path is not None and isinstance(attribute, str) and attribute.isidentifier():
            self._note(node, f"{path}.{attribute}", optional=optional)

    def _note(
        self, node: Any, name: str, call: tuple[int, tuple[str, ...]] | None = None, optional: bool = False
    ) -> None:
        self.found.append(Use(self.file, node.lineno, name, call, optional))

    def _path(self, node: ast.AST) -> str | None:
        """Return the name of torch that an expression stands for."""
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.bound:
            return None
        return ".".join((self.bound[node.id], *reversed(attributes)))


def _is_torch(module: str) -> bool:
    return module == "torch" or module.startswith("torch.")
