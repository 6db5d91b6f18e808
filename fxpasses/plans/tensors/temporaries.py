"""What Inductor's code does in each call but needs to do only once: small tensors that only its kernels see,
and assertions on results.

Allocating a tensor or a view takes half as long as a small kernel. A pool keeps those that a call has made
and nothing else has seen. A call takes them out and puts them back. What a torch operator returns for inputs
of fixed sizes is checked in the first call of a process.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

_MAX_TENSOR_BYTES, _MAX_POOL_BYTES = 1 << 14, 1 << 20
"""The most bytes of a pooled tensor, and of all of a function. Kernels on larger ones outweigh allocation."""


def functions(body: Sequence[ast.stmt]) -> Iterator[ast.FunctionDef]:
    """The functions that statements define, including methods."""
    nodes = (node for statement in body for node in ast.walk(statement))
    return (node for node in nodes if isinstance(node, ast.FunctionDef))


def pool_temporaries(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Pool tensors of fixed sizes that only kernels see; returns the statements that make the pools."""
    made: list[ast.stmt] = []
    kernels = {
        _target(s)
        for s in body
        if isinstance(s, ast.Assign) and _text(s.value).startswith("getattr(_kernels[")
    }
    for number, function in enumerate(functions(body)):
        if not _has_single_return(function):
            continue
        found = _Temporaries(function, kernels)
        if found.pooled_names:
            made += found.rewrite(number)
    return made


def check_once(body: Sequence[ast.stmt], *, fixed: bool) -> list[ast.stmt]:
    """Remove assertions on inputs, which guards have checked, and assert what operators return in the first
    call only.

    Args:
        body: the statements that define the functions.
        fixed: whether all sizes are fixed; otherwise a call may be the first for its sizes.

    Returns:
        The statements that track whether it is the first call.
    """
    made: list[ast.stmt] = []
    for number, function in enumerate(functions(body)):
        checks = {s: call for s in function.body if (call := _assertion_call(s)) is not None}
        of_inputs = [s for s, call in checks.items() if _text(call.args[-1]) == "'input'"]
        function.body[:] = [s for s in function.body if s not in of_inputs]
        of_fixed = [s for s, call in checks.items() if set(_names(*call.args[1:])) <= {"torch"}]
        if not fixed or not {*of_fixed}.difference(of_inputs) or not _has_single_return(function):
            continue
        name = f"first_call_{number}"
        made += ast.parse(f"{name} = [True]").body
        function.body[:] = [
            ast.If(ast.Name(name, ast.Load()), [s], []) if s in of_fixed else s for s in function.body
        ]
        function.body[-1:-1] = ast.parse(f"{name}.clear()").body
    return made


class _Temporaries:
    """The tensors of a function that only kernels see.

    Attributes:
        pooled_names: the names of those with fixed sizes, and of views of them.
    """

    def __init__(self, function: ast.FunctionDef, kernels: set[str]) -> None:
        self._function, self._kernels = function, kernels
        stored = [
            n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        ]
        self._sizes: dict[str, int] = {}
        root: dict[str, str] = {}
        seen: set[int] = set()  # uses of a name in which the tensor does not escape
        for statement in function.body:
            name = _target(statement)
            if name and stored.count(name) == 1 and isinstance(statement, ast.Assign):
                value = statement.value
                size = _tensor_bytes(value)
                of = viewed_tensor(value)
                if size is not None:
                    self._sizes[name], root[name] = size, name
                elif of is not None and of.id in root:
                    root[name] = root[of.id]
                    seen.add(id(of))
            elif isinstance(statement, ast.Delete):
                seen.update(map(id, statement.targets))
            seen.update(
                id(name)
                for name in map(viewed_tensor, kernel_arguments(statement, self._kernels))
                if name is not None
            )
        loads = (
            n for n in ast.walk(function) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Store)
        )
        escaping = {root[n.id] for n in loads if n.id in root and id(n) not in seen}
        left, roots = _MAX_POOL_BYTES, set[str]()
        for name, size in self._sizes.items():
            if name not in escaping and size <= min(_MAX_TENSOR_BYTES, left):
                left -= size
                roots.add(name)
        self.pooled_names = {name for name, of in root.items() if of in roots}

    def rewrite(self, number: int) -> list[ast.stmt]:
        """Rewrite the function; returns the statements that make its pool, with a unique ``number``."""
        making: list[ast.stmt] = []
        rest: list[ast.stmt] = []
        views: dict[str, str] = {}
        for statement in self._function.body:
            if _target(statement) in self.pooled_names:
                making.append(statement)
                continue
            if isinstance(statement, ast.Delete):
                statement.targets = [t for t in statement.targets if _text(t) not in self.pooled_names]
                if not statement.targets:
                    continue
            self._pool_views(statement, views)
            rest.append(statement)
        making += ast.parse("\n".join(f"{name} = {text}" for text, name in views.items())).body
        used = sorted({*_names(*rest)} & {*self.pooled_names, *views.values()})
        pool, names = f"pool_of_{number}", ", ".join(used)
        take = f"try:\n    taken_ = {pool}.pop()\nexcept IndexError:\n    taken_ = make_{pool}()\n({names},) = taken_"
        self._function.body[:] = [
            *ast.parse(take).body,
            *rest[:-1],
            *ast.parse(f"{pool}.append(taken_)").body,
            rest[-1],
        ]
        # A backward pass may run in inference mode. Other modes may not write to tensors created in it.
        text = f"{pool} = []\ndef make_{pool}():\n    with torch.inference_mode(False):\n        pass\n    return ({names},)"
        made = ast.parse(text).body
        made[1].body[0].body = making  # type: ignore[attr-defined]
        return made

    def _pool_views(self, statement: ast.stmt, views: dict[str, str]) -> None:
        for argument in kernel_arguments(statement, self._kernels):
            of = viewed_tensor(argument)
            if of is not None and of is not argument and of.id in self.pooled_names:
                name = views.setdefault(_text(argument), f"kept_view_{len(views)}")
                replace_argument(statement, argument, ast.Name(name, ast.Load()))


def kernel_arguments(statement: ast.stmt, kernels: Collection[str]) -> list[ast.expr]:
    """The arguments of a kernel call that returns nothing or only its ``out``: nothing else sees them."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return []
    call = statement.value
    called = _text(call.func)
    of_torch = called.startswith("extern_kernels.") and any(k.arg == "out" for k in call.keywords)
    known = of_torch or called in kernels or called in _ASSERTIONS
    return [*call.args, *(k.value for k in call.keywords)] if known else []


def replace_argument(statement: ast.stmt, old: ast.expr, new: ast.expr) -> None:
    """Make a statement pass another argument to its kernel.

    Args:
        statement: changed in place.
        old: the argument.
        new: its replacement.
    """
    assert isinstance(statement, ast.Expr)
    assert isinstance(statement.value, ast.Call)
    statement.value.args = [new if a is old else a for a in statement.value.args]
    for keyword in statement.value.keywords:
        keyword.value = new if keyword.value is old else keyword.value


def viewed_tensor(value: ast.expr) -> ast.Name | None:
    """The tensor that an expression names or reads through a view of fixed sizes."""
    if isinstance(value, ast.Name):
        return value
    if (
        not isinstance(value, ast.Call)
        or _text(value.func) != "reinterpret_tensor"
        or _names(*value.args[1:])
    ):
        return None
    return value.args[0] if isinstance(value.args[0], ast.Name) else None


def _tensor_bytes(value: ast.expr) -> int | None:
    """The size in bytes of the fixed-size tensor that an expression makes, or None."""
    if not isinstance(value, ast.Call) or _text(value.func) != "empty_strided_cpu":
        return None
    try:
        size, stride = map(ast.literal_eval, value.args[:2])
    except ValueError:
        return None
    dtype = getattr(torch, _text(value.args[2]).removeprefix("torch."))
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    return int((last + 1) * dtype.itemsize)


def _assertion_call(statement: ast.stmt) -> ast.Call | None:
    call = statement.value if isinstance(statement, ast.Expr) else None
    return call if isinstance(call, ast.Call) and _text(call.func) in _ASSERTIONS else None


_ASSERTIONS = (
    "assert_size_stride",
    "assert_size_stride_grouped",
    "assert_tensor_metadata",
    "assert_alignment",
)


def _has_single_return(function: ast.FunctionDef) -> bool:
    returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
    return len(returns) == 1 and returns[0] is function.body[-1]


def _target(statement: ast.stmt) -> str:
    """The name that a statement assigns, or ""."""
    single = isinstance(statement, ast.Assign) and len(statement.targets) == 1
    target = statement.targets[0] if single else None  # type: ignore[attr-defined]
    return target.id if isinstance(target, ast.Name) else ""


def _names(*trees: ast.AST) -> list[str]:
    return [node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)]


_text: Callable[[ast.AST], str] = ast.unparse
