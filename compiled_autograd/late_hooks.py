"""Hooks that user code adds to a tensor or a node while a captured pass runs.

The engine would still call one whose node has its turn later in the pass. A captured graph has no place for it,
and must not drop it silently. A tensor's registration raises before anything is registered. A node's goes through
C++, which tells Python of the hook but not of the node (``registerFunctionHook`` in ``python_cpp_function.cpp``
calls ``Function._register_hook`` with the node's dict of hooks): it is looked at when the user code is back, taken
away again, and the pass raises.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from compiled_autograd import _torch
from compiled_autograd.errors import LateHookError
from compiled_autograd.running import BackwardPass, LateNodeHook, running
from compiled_autograd.schedule import edge_of

__all__ = ["refuse_node_hooks", "register_hook", "register_node_hook", "register_post_accumulate_grad_hook"]


def register_hook(self: torch.Tensor, hook: Callable[..., Any]) -> Any:
    """``Tensor.register_hook``.

    Raises:
        LateHookError: the running captured pass has yet to compute this tensor's gradient.
    """
    _refuse_if_to_come(self)
    return _torch.register_hook(self, hook)


def register_post_accumulate_grad_hook(self: torch.Tensor, hook: Callable[..., Any]) -> Any:
    """``Tensor.register_post_accumulate_grad_hook``.

    Raises:
        LateHookError: the running captured pass has yet to accumulate this tensor's gradient.
    """
    _refuse_if_to_come(self)
    return _torch.register_post_accumulate_grad_hook(self, hook)


def _refuse_if_to_come(tensor: torch.Tensor) -> None:
    current = running.captured()
    if current is None or not tensor.requires_grad:
        return
    node, _ = edge_of(tensor)
    nodes = current.walk()
    index = next((i for i, walked in enumerate(nodes) if walked.node is node), None)
    if index is None:
        return  # a tensor of another graph, such as one that checkpointing computes again
    order = current.execution_order()
    # A node's hooks are read at once when its turn comes, so that its own are too late in eager as well.
    if order.index(index) > order.index(current.node):
        raise LateHookError(nodes[index].name, nodes[current.node].name)


@dataclasses.dataclass
class _Question:
    """In place of a hook: asks C++ for the dict in which a node keeps its hooks, and registers nothing."""

    hooks: Any = None


class _AnsweredError(Exception):
    """Makes C++ give up a registration that only asked."""


@staticmethod  # type: ignore[misc]
def register_node_hook(hooks: Any, hook: Any) -> Any:
    """``Function._register_hook``: C++ calls it with the hooks that a node has, or None, and adds what it returns."""
    if isinstance(hook, _Question):
        hook.hooks = hooks
        raise _AnsweredError
    kept, handle = _torch.register_node_hook(hooks, hook)
    current = running.captured()
    if current is not None:
        current.late_node_hooks.append(LateNodeHook(kept, handle, current.node, current.phase))
    return kept, handle


def _hooks_of(register: Callable[[Any], Any]) -> Any:
    question = _Question()
    try:
        register(question)
    except _AnsweredError:
        return question.hooks
    raise AssertionError("torch registers hooks of a node without Function._register_hook")


_BEFORE_PRE_HOOKS = "tensor pre-hook"
_AFTER_THE_NODE = "post-hook"


def refuse_node_hooks(current: BackwardPass) -> None:
    """Look at the hooks that user code has added to nodes since the last look.

    Raises:
        LateHookError: one belongs to a node of this pass and would still be called; it is taken away again.
    """
    added, current.late_node_hooks = current.late_node_hooks, []
    order = current.execution_order()
    for index, walked in enumerate(current.walk()):
        if walked.node is None or not walked.needed:
            continue
        post, pre = _hooks_of(walked.node.register_hook), _hooks_of(walked.node.register_prehook)
        for late in added:
            turn = order.index(index) - order.index(late.node)
            if late.hooks is post:
                to_come = turn > 0 or (turn == 0 and late.phase != _AFTER_THE_NODE)
            elif late.hooks is pre:
                to_come = turn > 0 or (turn == 0 and late.phase == _BEFORE_PRE_HOOKS)
            else:
                continue
            if to_come and late.handle.id in late.hooks:
                late.handle.remove()
                raise LateHookError(walked.name, current.walk()[late.node].name)
