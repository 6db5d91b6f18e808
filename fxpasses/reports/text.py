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
        origin = _origin_text(node)
        if origin != last and node.op != "placeholder":
            lines += ["", f"# {origin}"] if origin else [""]
            last = origin
        lines.append(_call_text(node))
    return "\n".join(lines) + "\n"


def _origin_text(node: fx.Node) -> str:
    origin = provenance(node)
    parts = [origin.source]
    if origin.module:
        parts.append(f"module {origin.module} ({origin.module_type})")
    if origin.forward_node:
        parts.append(f"gradient of {origin.forward_node}")
    return " | ".join(part for part in parts if part)


def _call_text(node: fx.Node) -> str:
    type_name = type_text(value_of(node))
    if node.op == "placeholder":
        return f"{node.name}: {type_name} = input"
    if node.op == "get_attr":
        return f"{node.name}: {type_name} = self.{node.target}"
    arguments = [str(a) for a in node.args] + [f"{k}={v}" for k, v in node.kwargs.items()]
    target = f"self.{node.target}" if node.op == "call_module" else node.target
    name = str(target) if hasattr(target, "_schema") else getattr(target, "__name__", str(target))
    return f"{node.name}: {type_name} = {name}({', '.join(arguments)})"


def type_text(value: object) -> str:
    """Return ``float32[2, 3]`` for a tensor, a list in parentheses for several, else the type's name."""
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        return f"{name}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(map(type_text, value)) + ")"
    return type(value).__name__
