"""Graphs as readable text."""

from __future__ import annotations

import torch
from torch import fx

from fake.wrong_arguments import check_type
from fxpasses.graphs.provenance import provenance
from fxpasses.graphs.rewriting import value_of


def annotated_code(gm: fx.GraphModule) -> str:
    """Return a graph as text: one call per line with the type of its value, below the user's line it is from.

    Raises:
        ArgumentTypeError: ``gm`` is not a graph.
    """
    wanted = "a torch.fx.GraphModule (of a capture: captured.forward, captured.backward or captured.joint)"
    check_type("annotated_code", "gm", gm, fx.GraphModule, wanted)
    lines: list[str] = []
    last = ""
    for node in gm.graph.nodes:
        if node.op == "output":
            lines.append(f"return {node.args[0]}")
            continue
        where = _where(node)
        if where != last and node.op != "placeholder":
            lines += ["", f"# {where}"] if where else [""]
            last = where
        lines.append(_line(node))
    return "\n".join(lines) + "\n"


def _where(node: fx.Node) -> str:
    found = provenance(node)
    parts = [found.source]
    if found.module:
        parts.append(f"module {found.module} ({found.module_type})")
    if found.forward_node:
        parts.append(f"gradient of {found.forward_node}")
    return " | ".join(part for part in parts if part)


def _line(node: fx.Node) -> str:
    kind = type_text(value_of(node))
    if node.op == "placeholder":
        return f"{node.name}: {kind} = input"
    if node.op == "get_attr":
        return f"{node.name}: {kind} = self.{node.target}"
    arguments = [str(a) for a in node.args] + [f"{k}={v}" for k, v in node.kwargs.items()]
    called = f"self.{node.target}" if node.op == "call_module" else node.target
    name = str(called) if hasattr(called, "_schema") else getattr(called, "__name__", str(called))
    return f"{node.name}: {kind} = {name}({', '.join(arguments)})"


def type_text(value: object) -> str:
    """Return ``float32[2, 3]`` for a tensor, a list in parentheses for several, else the type's name."""
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        return f"{name}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(map(type_text, value)) + ")"
    return type(value).__name__
