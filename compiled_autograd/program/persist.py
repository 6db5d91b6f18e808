"""Save a captured graph as a Python file, and load it back.

The file is plain code over named operators, so it can be read, edited and run. The functional form of an
autograd node exists in a process only after a backward pass with such a node was captured there.
"""

import importlib.util
import os
import pathlib
import re
from typing import Any

import torch
from torch import fx

from compiled_autograd import _torch
from compiled_autograd.errors import GraphReloadError, UnboundOperatorError
from fake.wrong_arguments import check_type

_RUNTIME_MODULES = {
    f"compiled_autograd.runtime.{name}": f"compiled_autograd_runtime_{name}"
    for name in ("aot_functional", "functional", "validation")
}
"""Our modules whose functions graphs call, and FX's names for them."""
_HEADER = '''"""A captured backward pass, written by compiled_autograd.save_graph; run it with ``forward(...)``."""

import torch
from math import inf, nan
from torch import device
from compiled_autograd.program.persist import operator as autograd_node
''' + "".join(f"import {module} as {name}\n" for module, name in _RUNTIME_MODULES.items())
_OPERATOR = "torch__dynamo_compiled_autograd_ops_"


def operator(name: str) -> Any:
    """Return the functional form of the autograd node ``name``, such as ``MulBackward0``.

    Raises:
        UnboundOperatorError: if no backward pass with such a node has been captured in this process yet.
    """
    try:
        return _torch.functional_operators.get(name)
    except AttributeError:
        raise UnboundOperatorError(name) from None


def save_graph(graph: fx.GraphModule, path: str | pathlib.Path) -> None:
    """Write ``graph``, as captured, to ``path``.

    Raises:
        GraphReloadError: if the graph holds constants, or calls something unnamed outside this process.
        ArgumentTypeError: if ``graph`` is not a graph, or ``path`` not a path.
    """
    check_type(
        "save_graph", "graph", graph, fx.GraphModule, "a captured graph, such as explain(...).graphs[0]"
    )
    check_type("save_graph", "path", path, (str, os.PathLike), "the path of a file")
    code = graph.code.strip()
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            raise GraphReloadError(
                str(path), f"{node.name}, a constant of a compiled function, has no place in a file"
            )
    for name, target in sorted(_targets(graph).items()):
        if name.startswith((_OPERATOR, *_RUNTIME_MODULES.values())) or name.split("_")[0] in (
            "torch",
            "device",
            "inf",
            "nan",
        ):
            continue
        if getattr(target, "__module__", None) != "_operator":
            raise GraphReloadError(str(path), f"{name} ({target!r}) cannot be named in a file")
    code = re.sub(rf"\b{_OPERATOR}(\w+)\(", r'autograd_node("\1")(', code)
    code = re.sub(rf"\b({'|'.join(_RUNTIME_MODULES.values())})_(\w+)\(", r"\1.\2(", code)
    code = code.replace("def forward(self, ", "def forward(", 1)
    pathlib.Path(path).write_text(_HEADER + "\n\n" + code + "\n")


def _targets(graph: fx.GraphModule) -> dict[str, Any]:
    return {
        node.name: node.target
        for node in graph.graph.nodes
        if node.op == "call_function"
        and not isinstance(node.target, str)
        and not getattr(node.target, "__module__", "").startswith("torch._ops.")
        and getattr(node.target, "__module__", None)
        not in (*_RUNTIME_MODULES, "_operator", "torch._dynamo.compiled_autograd.ops")
    }


class _Reloaded(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self._function = function

    def forward(self, *arguments: Any) -> Any:
        return self._function(*arguments)


def load_graph(path: str | pathlib.Path) -> torch.nn.Module:
    """Load a file that `save_graph` wrote. Call the result with the five arguments of a captured graph.

    Loading executes the file, so only load files that you trust.

    Raises:
        GraphReloadError: if the file does not exist, is not Python, or defines no ``forward``.
        ArgumentTypeError: if ``path`` is not a path.
    """
    check_type("load_graph", "path", path, (str, os.PathLike), "the path of a file that save_graph wrote")
    spec = importlib.util.spec_from_file_location("compiled_autograd_reloaded", path)
    if spec is None or spec.loader is None:
        raise GraphReloadError(str(path), "not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (OSError, SyntaxError) as error:
        raise GraphReloadError(str(path), f"cannot be read: {error}") from error
    if not hasattr(module, "forward"):
        raise GraphReloadError(str(path), "defines no forward")
    return _Reloaded(module.forward)
