"""The content of a Dynamo graph as a digest: the same in every process, whatever the values are called.

Besides the exact one there is that of its *family*: without sizes, so that the same model with a longer sequence, or with symbolic
sizes, is known again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpasses.compiling.factors import qualified
from fxpasses.graphs.rewriting import constants_of, subgraphs

__all__ = ["family_of", "graph_digest"]


def graph_digest(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """The digest of a graph's calls, and of the metadata of its inputs.

    Args:
        gm: a Dynamo graph.
        inputs: its inputs; of tensors the metadata count.
    """
    told = [
        (str(v.dtype), str(tuple(v.shape)), str(_strides(v)), str(v.device), v.requires_grad)
        if isinstance(v, torch.Tensor)
        else str(v)
        for v in inputs
    ]
    return _digest(f"{_lines(gm, sizes=True)}\n{told}")


def family_of(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """The digest without sizes: integers, symbolic numbers, and calls that make these are left out.

    Args:
        gm: a Dynamo graph.
        inputs: its inputs.
    """
    told = [
        (str(v.dtype), v.dim(), str(v.layout), str(v.device), v.requires_grad)
        for v in inputs
        if isinstance(v, torch.Tensor)
    ]
    return _digest(f"{_lines(gm, sizes=False)}\n{told}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _strides(value: torch.Tensor) -> Any:
    return value.stride() if value.layout is torch.strided else value.layout


def _lines(gm: fx.GraphModule, sizes: bool) -> list[str]:
    """One line a call; values are called by their number. Without sizes, only calls that give tensors count."""
    constants = constants_of(gm)
    numbers: dict[fx.Node, str] = {}
    lines: list[str] = []
    for node in gm.graph.nodes:
        if not sizes and node.op != "output" and not _gives_tensors(node):
            numbers[node] = "#"
            continue
        target = node.target if isinstance(node.target, str) else qualified(node.target)
        if node.op == "placeholder":
            target = ""
        elif node.op == "get_attr" and node.target in constants:
            value = constants[node.target]
            target = f"constant {value.dtype} {tuple(value.shape) if sizes else value.dim()}"
        args = _told(node.args, numbers, sizes), _told(node.kwargs, numbers, sizes)
        numbers[node] = f"%{len(lines)}"
        lines.append(f"{node.op} {target} {args}")
    for name, inner in subgraphs(gm).items():
        lines += [f"{name}: {line}" for line in _lines(inner, sizes)]
    return lines


def _gives_tensors(node: fx.Node) -> bool:
    value = node.meta.get("example_value", node.meta.get("val"))
    return not isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Size))


def _told(value: Any, numbers: Mapping[fx.Node, str], sizes: bool) -> str:
    if isinstance(value, fx.Node):
        return numbers[value]
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_told(v, numbers, sizes) for v in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {_told(v, numbers, sizes)}' for k, v in value.items())}}}"
    if isinstance(value, slice):
        return f"slice{_told((value.start, value.stop, value.step), numbers, sizes)}"
    if not sizes and isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return "#"
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text
