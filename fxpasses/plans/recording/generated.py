"""Compiled graphs as one module of plain Python that runs without Inductor and fxpasses' compiler.

Inductor's generated modules are rewritten as syntax trees: kernels become entries of shared libraries,
classes and functions are kept, imports are dropped. Every remaining name must be one that the runtime of
plans defines.
"""

from __future__ import annotations

import ast
import marshal
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fake.seam.symbolic_shapes import text_of_size
from fxpasses.compiling.saved_code import unwrap_unsaved
from fxpasses.plans import _torch
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.objects.code import codes_inside, global_accesses
from fxpasses.plans.recording._torch_compiled import CompiledFxGraph, extern_kernels, why_not_plain
from fxpasses.plans.tensors.held_views import cache_views
from fxpasses.plans.tensors.temporaries import check_once, pool_temporaries
from fxpasses.regional.compiled_region import CompiledRegion, table

_DROPPED_FUNCTIONS = ("get_args", "benchmark_compiled_module")
_RUNTIME_NAMES = frozenset({*_torch.prelude(), "extern_kernels", "_kernels", "_constants", "fitted", "Conforming", "assert_tensor_metadata", "range", "zip", "len", "min", "max", "int",
                    "float", "bool", "tuple", "list", "print", "AssertionError", "abs", "ZeroDivisionError", "math", "id", "held_views", "IndexError", "gated_graph", "SizesOfCalls"})  # fmt: skip
_NAMESPACES = ("aten", "mkldnn", "mkl", "prims", "_c10d_functional")


class Module:
    """Builds the module of a plan: each compiled graph that is added becomes a function in it."""

    def __init__(self, *, fixed: bool, operators: Collection[str] = ()) -> None:
        """Args: whether it holds only for the compiled sizes, and operators outside torch that it may use."""
        self._fixed, self._conforming, self._operators = fixed, dict[str, str](), operators
        self._body: list[ast.stmt] = []
        self._graph_names: dict[int, str] = {}
        self._kept_alive: list[Any] = []
        self._externs: dict[str, str] = {}
        self._kernels: dict[str, Path] = {}
        self._constants: list[torch.Tensor] = []

    def add(self, name: str, compiled: Any) -> None:
        """Define ``name`` as a compiled graph.

        Raises:
            NoPlan: it cannot be written as code.
        """
        self._body += ast.parse(f"{name} = {self._graph(compiled)}").body

    def add_guards(self, code: str, known: Collection[str]) -> list[str]:
        """Define ``accepts``, which returns whether the graphs hold for given sizes of inputs.

        Args:
            code: defines a function of the inputs.
            known: its parameters that need no guard.

        Returns:
            The remaining parameters.
        """
        tree: Any = ast.parse(code)
        function = tree.body[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
                node.values = [v for v in node.values if not _names(v) or not _names(v) <= set(known)] or [
                    ast.Constant(True)
                ]
        for node in ast.walk(tree):
            if isinstance(node, ast.BoolOp) and len(node.values) == 1:
                node.values.append(ast.Constant(True))
        used = _names(ast.Module(function.body, []))
        function.args.args = [a for a in function.args.args if a.arg in used]
        self._body += tree.body
        return [a.arg for a in function.args.args]

    def sections(self) -> tuple[bytes, dict[str, bytes], dict[str, str], list[list[Any]]]:
        """The code, shared libraries, functions of torch and constants: the arguments of
        :func:`fxpasses.plans.running.runtime.load_code`."""
        tree = ast.fix_missing_locations(ast.Module(self._body, type_ignores=[]))
        code = compile(tree, "<plan>", "exec", dont_inherit=True)
        _check_names(code)
        kernels = {n: p.read_bytes() for n, p in self._kernels.items()}
        constants = [
            [
                str(t.dtype).removeprefix("torch."),
                list(t.shape),
                list(t.stride()),
                t.reshape(-1).view(torch.uint8).tolist(),
            ]
            for t in self._constants
        ]
        return marshal.dumps(code), kernels, self._externs, constants

    def _graph(self, compiled: Any) -> str:
        if id(compiled) not in self._graph_names:
            self._kept_alive.append(compiled)
            code = unwrap_unsaved(compiled)
            if (sends := getattr(compiled, "sends", None)) is not None:
                body = self._gated(sends, compiled.called[0])
            elif isinstance(code, CompiledFxGraph):
                body = self._inductor(code)
            elif (
                getattr(compiled, "source", None) is not None and getattr(compiled, "parts", None) is not None
            ):
                body = self._stitched(compiled.source, compiled.parts)
            else:
                body = _passthrough(compiled)
            name = f"graph_{len(self._graph_names)}"
            self._graph_names[id(compiled)] = name
            function: Any = ast.parse(f"def make_{name}():\n    pass").body[0]
            function.body = body
            self._body += [function, *ast.parse(f"{name} = make_{name}()").body]
        return self._graph_names[id(compiled)]

    def _gated(self, sends: Any, compiled: Any) -> list[ast.stmt]:
        if sends.agreed:
            raise NoPlan("processes that agree on what they save")
        text = f"def f():\n    return {sends.code(self._graph(compiled))}"
        return ast.parse(text).body[0].body  # type: ignore[attr-defined]

    def _stitched(self, source: str, parts: Mapping[str, Callable[..., Any]]) -> list[ast.stmt]:
        body: list[ast.stmt] = []
        for name, part in parts.items():
            region = getattr(part, "__self__", None)
            text = (
                self.region(region, part.__name__)
                if isinstance(region, CompiledRegion)
                else self._graph(part)
            )
            body += ast.parse(f"{name} = {text}").body
        return [*body, *ast.parse(source).body, *ast.parse("def f():\n    return call").body[0].body]  # type: ignore[attr-defined]

    def region(self, region: CompiledRegion, method: str) -> str:
        """An expression for the function of a region, which takes its tensors and sizes.

        Raises:
            NoPlan: it cannot be written as code.
        """
        if region.exact:
            raise NoPlan("graphs that are checked while they run")
        forward = method == "run_forward"
        specs = region.forward_specs if forward else region.backward_specs
        if any(spec.device.type != "cpu" for spec in specs):
            raise NoPlan("a tensor that is not on the CPU")
        symbols = ", ".join(map(text_of_size, region.symbols))
        text = ", ".join(
            f"({_tuple_code(spec.shape)}, {_tuple_code(spec.stride)}, {spec.dtype})" for spec in specs
        )
        graph = self._graph(region.forward if forward else region.backward)
        made = f"Conforming({graph}, lambda {symbols}: [{text}]"
        if not forward and region.saved_sizes != region.symbols:
            made += f", lambda {symbols}: {_tuple_code(region.saved_sizes)}"
        made += ")"
        if made not in self._conforming:
            self._conforming[made] = name = f"conforming_{len(self._conforming)}"
            self._body += ast.parse(f"{name} = {made}").body
        return self._conforming[made]

    def _inductor(self, compiled: CompiledFxGraph) -> list[ast.stmt]:
        problem = why_not_plain(compiled)
        if problem:
            raise NoPlan(problem)
        call: Any = compiled.current_callable
        runner = getattr(call, "__self__", None)
        known = getattr(call, "__func__", call).__globals__
        if runner is None or getattr(runner, "partitions", None) != [] or known.get("call") != call:
            raise NoPlan("a compiled graph that is called in an unknown way")
        body: list[ast.stmt] = []
        for statement in ast.parse(compiled.source_code).body:
            kept = self._statement(statement, known, compiled.constants or {})
            if kept is not None:
                body.append(kept)
        called = _RegionCalls(self)
        body = [called.visit(statement) for statement in body]
        self._resolve_names(body)
        operators = _OperatorLookups()
        for statement in body:
            operators.visit(statement)
        once = [*pool_temporaries(body), *check_once(body, fixed=self._fixed), *cache_views(body)]
        body = [*called.regions, *operators.found(), *once, *body]
        return [*body, *ast.parse("def f():\n    return call").body[0].body]  # type: ignore[attr-defined]

    def _statement(
        self, statement: ast.stmt, known: Mapping[str, Any], constants: Mapping[str, torch.Tensor]
    ) -> ast.stmt | None:
        if isinstance(statement, (ast.Import, ast.ImportFrom, ast.If, ast.Delete)):
            return None
        if isinstance(statement, ast.Expr):
            text = ast.unparse(statement)
            if isinstance(statement.value, ast.Constant) or text == "async_compile.wait(globals())":
                return None
            raise NoPlan("generated code with an unknown statement", text[:60])
        if isinstance(statement, ast.FunctionDef) and statement.name in _DROPPED_FUNCTIONS:
            return None
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            text = ast.unparse(statement.value)
            if (
                name in _torch.prelude()
                or text == "AsyncCompile()"
                or text.startswith(("torch._C.", "torch.ops."))
            ):
                return None
            if name in constants:
                self._constants.append(constants[name])
                return ast.parse(f"{name} = _constants[{len(self._constants) - 1}]").body[0]
            if text.startswith("async_compile."):
                return ast.parse(f"{name} = {self._kernel(known[name])}").body[0]
        return statement

    def _kernel(self, kernel: Any) -> str:
        library = getattr(kernel, "__self__", None)
        file = getattr(library, "__file__", None)
        if not isinstance(kernel, types.BuiltinFunctionType) or file is None:
            raise NoPlan("a kernel that is not in a shared library")
        assert isinstance(library, types.ModuleType)
        path = Path(file)
        found = next((name for name, known in self._kernels.items() if known == path), None)
        if found is None:
            entry = library.__spec__.name if library.__spec__ is not None else library.__name__
            found = f"{len(self._kernels)} {entry}"
            self._kernels[found] = path
        return f"getattr(_kernels[{found!r}], {kernel.__name__!r})"

    def _resolve_names(self, body: list[ast.stmt]) -> None:
        """Note the functions of torch called as ``extern_kernels``. Refuse operators outside torch."""
        known: set[ast.AST] = set()
        for node in (inner for statement in body for inner in ast.walk(statement)):
            if not isinstance(node, ast.Attribute) or node in known:
                continue
            if ast.unparse(node).removeprefix("torch.ops.") in self._operators:
                known |= set(ast.walk(node))
                continue
            owner = node.value
            if isinstance(owner, ast.Name) and owner.id == "extern_kernels":
                self._externs[node.attr] = _path_in_torch(getattr(extern_kernels, node.attr), node.attr)
            elif isinstance(owner, ast.Attribute) and owner.attr == "ops" and node.attr not in _NAMESPACES:
                raise NoPlan("an operator that is not torch's own", ast.unparse(node))


def _passthrough(compiled: Any) -> list[ast.stmt]:
    """Code for a graph without calls, for which Inductor generates none."""
    cells = [cell.cell_contents for cell in getattr(compiled, "__closure__", None) or ()]
    graphs = [
        module.graph
        for cell in cells
        if isinstance(module := getattr(cell, "__self__", None), fx.GraphModule)
    ]
    nodes = list(graphs[0].nodes) if len(graphs) == 1 else []
    if not nodes or any(node.op not in ("placeholder", "output") for node in nodes):
        raise NoPlan(
            "a graph that runs without generated code, as compiler='eager' has them",
            type(compiled).__qualname__,
        )
    (output,) = nodes[-1].args
    if not isinstance(output, (tuple, list)) or not all(
        value is None or isinstance(value, fx.Node) for value in output
    ):
        raise NoPlan("a graph that runs without generated code", "its output")
    given = "".join(f"{node.name}, " for node in nodes[:-1])
    text = f"def call(args):\n    {f'{given}= args' if given else 'pass'}\n    args.clear()\n    return ({''.join(f'{value}, ' for value in output)})"
    return [*ast.parse(text).body, *ast.parse("def f():\n    return call").body[0].body]  # type: ignore[attr-defined]


def used_parameters(code: str) -> dict[str, int]:
    """The parameters that the first function in ``code`` uses, with their positions."""
    function: Any = ast.parse(code).body[0]
    used = _names(ast.Module(function.body, []))
    return {one.arg: i for i, one in enumerate(function.args.args) if one.arg in used}


def _tuple_code(sizes: Iterable[Any]) -> str:
    """Code for a tuple of sizes, which may be expressions of a region's symbols."""
    return f"({''.join(f'{text_of_size(size)}, ' for size in sizes)})"


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


class _RegionCalls(ast.NodeTransformer):
    """Replaces calls of region operators by calls of functions of the plan.

    Attributes:
        regions: the statements that define these functions.
    """

    def __init__(self, module: Module) -> None:
        self.regions: list[ast.stmt] = []
        self._module = module

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace such a call."""
        self.generic_visit(node)
        named = isinstance(node.func, ast.Attribute) and node.func.attr == "default"
        operator = ast.unparse(node.func).removeprefix("torch.ops.fxpasses.") if named else ""
        if operator in _REGIONS and isinstance(node.args[0], ast.Constant):
            text = self._module.region(table[str(node.args[0].value)], _REGIONS[operator])
            name = f"region_{len(self.regions)}"
            self.regions += ast.parse(f"{name} = {text}").body
            return ast.Call(ast.Name(name, ast.Load()), node.args[1:], [])
        return node


_REGIONS = {
    "region_forward.default": "run_forward",
    "region_forward_random.default": "run_forward",
    "region_backward.default": "run_backward",
}


class _OperatorLookups(ast.NodeTransformer):
    """Hoists the lookup of operators out of each call."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def found(self) -> list[ast.stmt]:
        """The statements that look them up."""
        return ast.parse("\n".join(f"{name} = {path}" for path, name in self._names.items())).body

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Replace ``torch.ops.namespace.name.overload``."""
        path = ast.unparse(node)
        if not path.startswith("torch.ops.") or path.count(".") != 4:
            return node
        return ast.Name(self._names.setdefault(path, f"operator_{len(self._names)}"), ast.Load())


def _path_in_torch(function: Any, name: str) -> str:
    for path, owner in ((name, torch), (f"_C._nn.{name}", _torch.nn_kernels)):
        if getattr(owner, name, None) is function:
            return path
    raise NoPlan("a kernel that only Inductor has", name)


def _check_names(code: types.CodeType) -> None:
    """Check that the code reads only names that it defines or the runtime knows."""
    known = (
        _RUNTIME_NAMES
        | {"getattr", "__name__"}
        | {name for how, name in global_accesses(code) if how == "STORE_NAME"}
    )
    for inner in codes_inside(code):
        for how, name in global_accesses(inner):
            if how in ("LOAD_GLOBAL", "LOAD_NAME") and name not in known:
                raise NoPlan("generated code that needs Inductor to run", name)
