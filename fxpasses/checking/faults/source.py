"""A pass as source code that recreates it in another process: by import, or with its source embedded."""

from __future__ import annotations

import ast
import builtins
import enum
import functools
import importlib.util
import inspect
import itertools
import re
import sys
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from fxpasses._torch import OpOverload
from fxpasses.pass_manager.pass_base import FunctionPass, Pass, option_fields
from fxpasses.patterns.pattern_pass import PatternPass
from fxpasses.patterns.pattern_tracing import ExampleTensor


class CannotEmbed(Exception):
    """Something that the pass uses can be neither imported nor written as source code."""


class PassSource:
    """Collects the lines that a file needs before it can name the pass.

    Attributes:
        paths: directories that must be on ``sys.path``.
        imports: import lines.
        definitions: assignments, functions and classes, in order.
    """

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.imports: list[str] = []
        self.definitions: list[str] = []
        self._bound: dict[str, Any] = {}

    def bind(self, name: str, value: Any, line: str = "") -> None:
        """Bind a value to a name in the file.

        Args:
            name: the global name.
            value: the object.
            line: an import that binds it, if known.

        Raises:
            CannotEmbed: there is no way to write it.
        """
        if name in self._bound:
            if self._bound[name] is not value:
                raise CannotEmbed(f"{name!r} stands for two things")
            return
        self._bound[name] = value
        if (text := _literal(value)) is not None:
            self.definitions.append(f"{name} = {text}")
        elif line:
            self.imports.append(line)
        elif isinstance(value, types.ModuleType):
            self._is_importable(value.__name__, getattr(value, "__file__", None))
            self.imports.append(
                f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}"
            )
        elif isinstance(value, Pass):
            self.definitions.append(f"{name} = {self.make(value)}")
        elif (origin := self._import_origin(value)) is not None:
            module, attribute = origin
            self.imports.append(
                f"from {module} import {attribute}" + (f" as {name}" if attribute != name else "")
            )
        elif isinstance(value, types.FunctionType) and value.__code__.co_name == "<lambda>":
            tree = _lambda_of(value)
            self._bind_names_in(tree, value)
            self.definitions += ["", f"{name} = {ast.unparse(tree)}", ""]
        elif isinstance(value, (types.FunctionType, type)):
            self._embed(value, name)
        else:
            try:
                self.definitions.append(f"{name} = {self.expression_for(value)}")
            except CannotEmbed as reason:
                raise CannotEmbed(f"{name!r} is {reason}") from reason

    def make(self, item: Pass) -> str:
        """Return an expression for the pass.

        Raises:
            CannotEmbed: it cannot be written.
        """
        if isinstance(item, (FunctionPass, PatternPass)):
            self.bind("fxpasses", sys.modules["fxpasses"])
            contract = item.contract
            promises = f"graphs={sorted(item.graphs)!r}, numerics={contract.numerics!r}, metadata={contract.metadata!r}"
            named = f"name={item.name!r}, {promises}"
        if isinstance(item, PatternPass):
            functions = [self.expression_for(f) for f in (item.pattern, item.replacement)]
            guard = f", where={self.expression_for(item.where)}" if item.where is not None else ""
            examples = ", ".join(map(self.expression_for, item.inputs))
            return f"fxpasses.pattern_pass({', '.join(functions)}, [{examples}], {named}{guard}, expect_match=False)"
        options = []
        for field in option_fields(item) if isinstance(item, FunctionPass) else fields(item):
            value = getattr(item, field.name)
            if field.default is not MISSING and value == field.default:
                continue
            try:
                options.append(f"{field.name}={self.expression_for(value)}")
            except CannotEmbed as reason:
                raise CannotEmbed(f"option {field.name!r}: {reason}") from reason
        if isinstance(item, FunctionPass):
            made = f"fxpasses.graph_pass({self.expression_for(item.function)}, {named})"
            return made + (f"({', '.join(options)})" if options else "")
        return f"{self.expression_for(type(item))}({', '.join(options)})"

    def expression_for(self, value: Any) -> str:
        """Return an expression for a value, and define what it needs.

        Raises:
            CannotEmbed: there is none.
        """
        if (text := _literal(value)) is not None:
            return text
        if isinstance(value, Pass):
            return self.make(value)
        if isinstance(value, enum.Enum):
            return f"{self.expression_for(type(value))}.{value.name}"
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if isinstance(value, ExampleTensor):
            place = "" if value.device.type == "cpu" else f", device={str(value.device)!r}"
            return f"torch.empty_strided({value.shape}, {value.stride}, dtype={value.dtype}{place})"
        if isinstance(value, functools.partial):
            given = [self.expression_for(v) for v in value.args]
            given += [f"{name}={self.expression_for(v)}" for name, v in value.keywords.items()]
            self.bind("functools", functools)
            return f"functools.partial({', '.join([self.expression_for(value.func), *given])})"
        if isinstance(value, (tuple, list, set, frozenset)) and type(value) in _BRACKETS:
            return _BRACKETS[type(value)]([self.expression_for(v) for v in value])
        if isinstance(value, dict):
            return (
                "{"
                + ", ".join(f"{self.expression_for(k)}: {self.expression_for(v)}" for k, v in value.items())
                + "}"
            )
        if isinstance(value, (types.FunctionType, types.ModuleType, type)):
            name = self._name_of(value)
            self.bind(name, value)
            return name
        if is_dataclass(value) and not isinstance(value, type):
            given = [
                f"{f.name}={self.expression_for(getattr(value, f.name))}" for f in fields(value) if f.init
            ]
            return f"{self.expression_for(type(value))}({', '.join(given)})"
        raise CannotEmbed(f"a {type(value).__name__}")

    def _name_of(self, value: Any) -> str:
        """Choose a name in the file for a named object: its own, unless that is taken or no identifier."""
        own = value.__name__.rpartition(".")[2]
        own = own if own.isidentifier() else "function"
        names = itertools.chain([own], (f"{own}_{number}" for number in itertools.count(2)))
        return next(name for name in names if self._bound.get(name, value) is value)

    def _import_origin(self, value: Any) -> tuple[str, str] | None:
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        if not module or module == "__main__" or not name.isidentifier():
            return None
        loaded = sys.modules.get(module)
        if getattr(loaded, name, None) is not value or not self._is_importable(
            module, getattr(loaded, "__file__", None)
        ):
            return None
        return module, name

    def _is_importable(self, module: str, file: str | None) -> bool:
        """Whether a new process finds the module. Records the directory that it needs for that."""
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError):
            return False
        if spec is None or (file and spec.origin and not Path(spec.origin).samefile(file)):
            return False
        if file and module not in sys.stdlib_module_names and "site-packages" not in file:
            depth = module.count(".") + (Path(file).name == "__init__.py")
            root = str(Path(file).resolve().parents[depth])
            if root not in self.paths and not file.startswith(sys.prefix):
                self.paths.append(root)
        return True

    def _embed(self, definition: Any, name: str) -> None:
        try:  # of the code: a function's wrapped one, or its name, may have been set by hand
            text = textwrap.dedent(inspect.getsource(getattr(definition, "__code__", definition)))
        except (OSError, TypeError) as error:
            raise CannotEmbed(f"the source of {definition.__qualname__} cannot be read") from error
        tree = ast.parse(text)
        body = tree.body[0]
        if isinstance(body, ast.FunctionDef):
            # Its decorators made it a pass, which is recreated.
            text = "\n".join(text.splitlines()[body.lineno - 1 :])
            body.decorator_list = []
        own = getattr(body, "name", definition.__name__)
        self._bind_names_in(body, definition, own if own == name else "")
        text = re.sub(rf"(?m)^((?:async )?(?:def|class) +){own}\b", rf"\g<1>{name}", text, count=1)
        held = vars(definition) if inspect.isfunction(definition) else {}
        given = [f"{name}.{k} = {self.expression_for(v)}" for k, v in held.items() if not k.startswith("__")]
        self.definitions += ["", text, *given, ""]

    def _bind_names_in(self, body: ast.AST, definition: Any, own: str = "") -> None:
        """Bind names that a definition takes from around it; ``own`` is its name, if the file keeps it."""
        local = {n.arg for n in ast.walk(body) if isinstance(n, ast.arg)}
        local |= {n.name for n in ast.walk(body) if isinstance(n, _NAME_BINDING_NODES) and n.name is not None}
        local |= {
            a.asname or a.name
            for n in ast.walk(body)
            if isinstance(n, (ast.Import, ast.ImportFrom))
            for a in n.names
        }
        local |= {n.id for n in ast.walk(body) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        known = _visible_names(definition)
        annotations = {id(m) for n in ast.walk(body) for a in _annotations(n) for m in ast.walk(a)}
        for node in ast.walk(body):
            if isinstance(node, ast.Name) and node.id not in local and node.id != own:
                if node.id in known:
                    line = _import_line(node.id, known[node.id], definition)
                    self.bind(node.id, known[node.id], line)
                elif not hasattr(builtins, node.id) and id(node) not in annotations:
                    raise CannotEmbed(f"{node.id!r} is not known where {definition.__qualname__} is defined")


_NAME_BINDING_NODES = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar
)  # fmt: skip
"""Nodes that bind a name that is not a node itself."""


def _lambda_of(function: types.FunctionType) -> ast.Lambda:
    """Find the expression of a lambda: the one on its line with the same code."""
    try:
        lines, _ = inspect.findsource(function)
        tree = ast.parse("".join(lines))
    except (OSError, TypeError, SyntaxError) as error:
        raise CannotEmbed("the source of a lambda cannot be read") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Lambda) and node.lineno == function.__code__.co_firstlineno:
            (code,) = (c for c in compile(ast.Expression(node), "", "eval").co_consts if inspect.iscode(c))
            if _code_signature(code) == _code_signature(function.__code__):
                return node
    raise CannotEmbed("the source of a lambda cannot be found")


def _code_signature(code: types.CodeType) -> tuple[Any, ...]:
    """What distinguishes lambdas on one line. Compiled alone, their free variables are globals."""
    constants = [repr(c) for c in code.co_consts if not inspect.iscode(c)]
    return code.co_varnames, {*code.co_names, *code.co_freevars}, constants


def _visible_names(definition: Any) -> Mapping[str, Any]:
    """Return the globals and closures that the definition's code sees."""
    functions = [definition] if inspect.isfunction(definition) else list(vars(definition).values())
    known = dict(vars(sys.modules[definition.__module__])) if definition.__module__ in sys.modules else {}
    for function in functions:
        if not inspect.isfunction(function):
            continue
        known.update(function.__globals__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if cell != types.CellType():
                known[name] = cell.cell_contents
    return known


def _import_line(name: str, value: Any, definition: Any) -> str:
    """The import from an installed module that bound ``name`` where ``definition`` is, or ""."""
    # Read the file, not the module, which a script run by path lacks.
    try:
        tree = ast.parse(Path(inspect.getsourcefile(definition) or "").read_text())
    except (OSError, TypeError, SyntaxError, UnicodeDecodeError):
        return ""
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
            continue
        origin = sys.modules.get(node.module)
        installed = "site-packages" in (getattr(origin, "__file__", None) or "")
        for alias in node.names:
            if (
                (alias.asname or alias.name) == name
                and installed
                and getattr(origin, alias.name, None) is value
            ):
                return f"from {node.module} import {alias.name}" + f" as {name}" * (alias.name != name)
    return ""


def _annotations(node: ast.AST) -> list[ast.AST]:
    found = [getattr(node, "annotation", None), getattr(node, "returns", None)]
    return [a for a in found if isinstance(a, ast.AST)]


def _literal(value: Any) -> str | None:
    """The value as an expression, or ``None``."""
    if value is None or isinstance(value, (bool, int, str, torch.dtype)):
        return repr(value)
    if isinstance(value, float):
        return repr(value) if value - value == 0 else f"float({str(value)!r})"
    if isinstance(value, (tuple, list, set, frozenset)) and type(value) in _BRACKETS:
        parts = [_literal(v) for v in value]
        if any(part is None for part in parts):
            return None
        return _BRACKETS[type(value)](parts)  # type: ignore[arg-type]
    if isinstance(value, dict):
        pairs = [(_literal(k), _literal(v)) for k, v in value.items()]
        return (
            None
            if any(None in pair for pair in pairs)
            else "{" + ", ".join(f"{k}: {v}" for k, v in pairs) + "}"
        )
    if isinstance(value, OpOverload) or type(value).__name__ == "OpOverloadPacket":
        return f"torch.ops.{value}"
    if type(value).__name__ == "_OpNamespace":
        return f"torch.ops.{value.name}"
    return None


_BRACKETS: dict[type, Callable[[list[str]], str]] = {
    tuple: lambda p: "(" + "".join(f"{x}, " for x in p) + ")",
    list: lambda p: "[" + ", ".join(p) + "]",
    set: lambda p: "{" + ", ".join(p) + "}" if p else "set()",
    frozenset: lambda p: "frozenset([" + ", ".join(p) + "])",
}


def pass_sources(items: Sequence[Pass]) -> tuple[PassSource, list[str]]:
    """Return the lines that a file needs to make these passes, and the expression that makes each.

    Raises:
        CannotEmbed: one cannot be written.
    """
    source = PassSource()
    return source, [_expression(item, source) for item in items]


def _expression(item: Pass, source: PassSource) -> str:
    made_of = getattr(item, "function", getattr(item, "pattern", None))
    module = getattr(made_of, "__module__", None) or "__main__"
    loaded = sys.modules.get(module)
    for name, value in (vars(loaded) if loaded and module != "__main__" else {}).items():
        if value is item and source._is_importable(module, getattr(loaded, "__file__", None)):
            source.imports.append(f"from {module} import {name}")
            return name
    return source.make(item)
