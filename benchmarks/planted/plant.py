"""The definition of a planted fault, and helpers to write one."""

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
"""Builds a model (or a function) and its inputs."""


@dataclass(frozen=True)
class Plant:
    """A wrong pass, and a program on which it is wrong.

    Attributes:
        passes: the passes that run after the default ones; the last one is wrong.
        workload: the program.
        dynamic: whether sizes are symbolic.
        training: whether gradients are computed.
        at: what the blame must contain besides the pass: a source line, a module, a site. "" for anything.
        alone: whether exactly one match site must be named.
        partners: names of passes that must be named as well.
        options: additional options of the backend.
        blame: the culprit, if it is not the last pass.
        surroundings: a context manager around compilation that plants a fault outside of passes.
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
        """The name of the pass or stage to blame."""
        return self.blame or self.passes[-1].name


def calls(gm: fx.GraphModule, *targets: object) -> list[fx.Node]:
    """Return the calls of the given operators, in graph order."""
    return [node for node in gm.graph.nodes if node.op == "call_function" and node.target in targets]


def known_value(node: object) -> Any:
    """Return what is known about a node's value (a fake tensor, a size), or ``None``."""
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def gradients(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Return those nodes of a joint graph that belong to the backward pass."""
    return [node for node in nodes if fxpasses.graphs.provenance.is_backward(node)]


def call_before(node: fx.Node, target: object, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call before ``node``."""
    with node.graph.inserting_before(node):
        return fxpasses.insert_call(node.graph, target, args, kwargs, like=node)


def put_after(node: fx.Node, target: object, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call after ``node`` that replaces it for all users; ``args`` may contain ``node``."""
    with node.graph.inserting_after(node):
        new = fxpasses.insert_call(node.graph, target, args, kwargs, like=node)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return new


def in_place_of(node: fx.Node, target: object, *args: Any, **kwargs: Any) -> fx.Node:
    """Replace ``node`` with a new call."""
    new = call_before(node, target, *args, **kwargs)
    swap(node, new)
    return new


def swap(node: fx.Node, value: Any) -> None:
    """Replace all uses of ``node`` with ``value``, and erase ``node``."""
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)
