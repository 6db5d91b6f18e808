"""What a planted fault is, and helpers to write one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

import fxpasses
from fxpasses.pass_manager.pass_base import Pass

__all__ = [
    "Plant",
    "Workload",
    "call_before",
    "calls",
    "gradients",
    "in_place_of",
    "known_value",
    "put_after",
    "swap",
]

aten, prims = torch.ops.aten, torch.ops.prims

Workload = Callable[[], tuple[Callable[..., Any], Sequence[Any]]]
"""Builds a model (or a function), and its inputs."""


@dataclass(frozen=True)
class Plant:
    """A wrong pass, and a program on which it is wrong.

    Attributes:
        passes: the passes that run after the default ones; the last one is wrong.
        workload: the program.
        dynamic: whether sizes are symbolic.
        training: whether gradients are computed.
        at: what the blame has to contain, besides the pass: a source line, a module, a site. "" for anything.
        alone: whether exactly one match site has to be named.
        partners: names of passes that have to be named along.
        options: further options of the backend.
        blame: who has to be blamed, when it is not the last pass.
        surroundings: a context manager around the compilation that plants a fault elsewhere than in a pass.
    """

    passes: tuple[Pass, ...]
    workload: Workload
    dynamic: bool = False
    training: bool = True
    at: str = ""
    alone: bool = False
    partners: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    blame: str = ""
    surroundings: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def guilty(self) -> str:
        """Name of the pass or stage to blame."""
        return self.blame or self.passes[-1].name


def calls(gm: fx.GraphModule, *targets: object) -> list[fx.Node]:
    """The calls of some operators, in the order of the graph."""
    return [node for node in gm.graph.nodes if node.op == "call_function" and node.target in targets]


def known_value(node: object) -> Any:
    """What is known about a node's value (a fake tensor, a size), or ``None``."""
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def gradients(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Those of the nodes of a joint graph that belong to the backward pass."""
    return [node for node in nodes if fxpasses.graphs.provenance.is_backward(node)]


def call_before(node: fx.Node, target: object, *args: Any, **kwargs: Any) -> fx.Node:
    """A new call in front of ``node``."""
    with node.graph.inserting_before(node):
        return fxpasses.insert_call(node.graph, target, args, kwargs, like=node)


def put_after(node: fx.Node, target: object, *args: Any, **kwargs: Any) -> fx.Node:
    """A new call behind ``node`` that all users of ``node`` use instead; ``args`` may contain ``node``."""
    with node.graph.inserting_after(node):
        new = fxpasses.insert_call(node.graph, target, args, kwargs, like=node)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return new


def in_place_of(node: fx.Node, target: object, *args: Any, **kwargs: Any) -> fx.Node:
    """A new call instead of ``node``."""
    new = call_before(node, target, *args, **kwargs)
    swap(node, new)
    return new


def swap(node: fx.Node, value: Any) -> None:
    """Let all users of ``node`` use ``value``, and erase ``node``."""
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)
