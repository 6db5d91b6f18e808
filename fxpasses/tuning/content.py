"""Digests of the content of a Dynamo graph: the same in every process, whatever its values are called.

There is an exact digest and one of the *family*, which ignores sizes and how often a layer is repeated. The
same model with a longer sequence, symbolic sizes or more layers has the same family. Graphs are of one family
if they have the same set of calls, each described with the calls that produce its arguments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpasses.compiling.factors import qualified
from fxpasses.graphs.rewriting import constants_of, subgraphs

_SIZE = "size"


def graph_digest(gm: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Return the digest of a graph's calls and of the metadata of its inputs.

    Args:
        gm: a Dynamo graph.
        inputs: its inputs. Only the metadata of tensors counts.
    """
    metadata = [
        (str(v.dtype), str(tuple(v.shape)), str(_strides(v)), str(v.device), v.requires_grad)
        if isinstance(v, torch.Tensor)
        else str(v)
        for v in inputs
    ]
    return _digest(f"{_call_lines(gm)}\n{metadata}")


def family_of(gm: fx.GraphModule, inputs: Sequence[Any] | None = None) -> str:
    """Return the digest of a graph and its inputs without sizes and repetitions.

    Args:
        gm: a Dynamo graph.
        inputs: its inputs; by default those that it was traced with.
    """
    if inputs is None:
        inputs = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    metadata = [
        f"{v.dtype} {v.dim()} {v.layout} {v.device} {v.requires_grad}"
        if isinstance(v, torch.Tensor)
        else _SIZE
        for v in inputs
    ]
    return _family(gm, metadata)


def _family(gm: fx.GraphModule, inputs: Sequence[str]) -> str:
    constants, inner = constants_of(gm), subgraphs(gm)
    placeholders = iter(inputs)
    calls: dict[fx.Node, str] = {}  # includes inputs and, with symbolic sizes, the calls that compute sizes
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            calls[node] = next(placeholders, "input")
        elif node.op == "get_attr" and node.target in constants:
            value = constants[node.target]
            calls[node] = f"constant {value.dtype} {value.dim()}"
        elif node.op == "get_attr":
            calls[node] = _family(inner[node.target], ()) if node.target in inner else "attribute"
        elif node.op == "output":
            calls[node] = node.op
        elif not _returns_tensors(node):
            calls[node] = _SIZE
        else:
            target = node.target if isinstance(node.target, str) else qualified(node.target)
            calls[node] = f"{target} {_argument_text(node.args, None)} {_argument_text(node.kwargs, None)}"
    arguments = {node: [calls[n] for n in node.all_input_nodes if calls[n] != _SIZE] for node in calls}
    output = gm.graph.output_node()
    descriptions = {f"result {text}" for text in arguments.pop(output)}
    descriptions |= {f"{calls[node]} of {texts}" for node, texts in arguments.items() if calls[node] != _SIZE}
    return _digest(str(sorted(descriptions)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _strides(value: torch.Tensor) -> Any:
    return value.stride() if value.layout is torch.strided else value.layout


def _call_lines(gm: fx.GraphModule) -> list[str]:
    """Return one line of text for each call. Values are named by their number."""
    constants = constants_of(gm)
    value_names: dict[fx.Node, str] = {}
    lines: list[str] = []
    for node in gm.graph.nodes:
        target = node.target if isinstance(node.target, str) else qualified(node.target)
        if node.op == "placeholder":
            target = ""
        elif node.op == "get_attr" and node.target in constants:
            value = constants[node.target]
            target = f"constant {value.dtype} {tuple(value.shape)}"
        args = _argument_text(node.args, value_names), _argument_text(node.kwargs, value_names)
        value_names[node] = f"%{len(lines)}"
        lines.append(f"{node.op} {target} {args}")
    for name, inner in subgraphs(gm).items():
        lines += [f"{name}: {line}" for line in _call_lines(inner)]
    return lines


def _returns_tensors(node: fx.Node) -> bool:
    value = node.meta.get("example_value", node.meta.get("val"))
    return not isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Size))


def _argument_text(value: Any, value_names: Mapping[fx.Node, str] | None) -> str:
    """Return an argument as text. Without numbers, all values and all sizes look the same."""
    if isinstance(value, fx.Node):
        return "%" if value_names is None else value_names[value]
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_argument_text(v, value_names) for v in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {_argument_text(v, value_names)}' for k, v in value.items())}}}"
    if isinstance(value, slice):
        return f"slice{_argument_text((value.start, value.stop, value.step), value_names)}"
    if value_names is None and isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return "%"  # with symbolic sizes this is a node
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text
