"""Hooks that user code adds to a tensor or a node while a captured pass runs.

The engine would still call such a hook if its node runs later in the pass. A captured graph has no call for
it, and must not drop it silently. For a tensor, registration raises before anything is registered. A node's
registration goes through C++, which gives Python the hook but not the node (``registerFunctionHook`` in
``python_cpp_function.cpp`` calls ``Function._register_hook`` with the node's dict of hooks). So it is checked
when the user code has returned: the hook is removed, and the pass raises.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from compiled_autograd import _torch
from compiled_autograd.errors import LateHookError
from compiled_autograd.runtime.node_order import edge_of
from compiled_autograd.runtime.running import BackwardPass, LateNodeHook, running


def register_hook(self: torch.Tensor, hook: Callable[..., Any]) -> Any:
    """``Tensor.register_hook``.

    Raises:
        LateHookError: if the running captured pass has yet to compute this tensor's gradient.
    """
    _raise_if_pending(self)
    return _torch.register_hook(self, hook)


def register_post_accumulate_grad_hook(self: torch.Tensor, hook: Callable[..., Any]) -> Any:
    """``Tensor.register_post_accumulate_grad_hook``.

    Raises:
        LateHookError: if the running captured pass has yet to accumulate this tensor's gradient.
    """
    _raise_if_pending(self)
    return _torch.register_post_accumulate_grad_hook(self, hook)


def _raise_if_pending(tensor: torch.Tensor) -> None:
    current = running.captured()
    if current is None or not tensor.requires_grad:
        return
    node, _ = edge_of(tensor)
    nodes = current.walk()
    index = next((i for i, walked in enumerate(nodes) if walked.node is node), None)
    if index is None:
        return  # a tensor of another graph, such as one recomputed by checkpointing
    order = current.execution_order()
    # A node's hooks are all read when it starts to run, so adding hooks to the running node is too late in
    # eager as well.
    if order.index(index) > order.index(current.node):
        raise LateHookError(nodes[index].name, nodes[current.node].name)


@dataclasses.dataclass
class _HooksQuery:
    """Passed as a hook: obtains from C++ the dict in which a node keeps its hooks, and registers nothing."""

    hooks: Any = None


class _QueryDoneError(Exception):
    """Aborts a registration in C++ that was only a query."""


@staticmethod  # type: ignore[misc]
def register_node_hook(hooks: Any, hook: Any) -> Any:
    """``Function._register_hook``: C++ calls it with the node's hooks or None, and stores what it returns."""
    if isinstance(hook, _HooksQuery):
        hook.hooks = hooks
        raise _QueryDoneError
    kept, handle = _torch.register_node_hook(hooks, hook)
    current = running.captured()
    if current is not None:
        current.late_node_hooks.append(LateNodeHook(kept, handle, current.node, current.phase))
    return kept, handle


def _hooks_of(register: Callable[[Any], Any]) -> Any:
    query = _HooksQuery()
    try:
        register(query)
    except _QueryDoneError:
        return query.hooks
    raise AssertionError("torch registers hooks of a node without Function._register_hook")


_TENSOR_PRE_HOOK = "tensor pre-hook"
_POST_HOOK = "post-hook"


def refuse_node_hooks(current: BackwardPass) -> None:
    """Check the hooks that user code has added to nodes since the last check.

    Raises:
        LateHookError: if some belong to nodes of this pass and would still be called. Those are removed.
    """
    added, current.late_node_hooks = current.late_node_hooks, []
    positions = {index: position for position, index in enumerate(current.execution_order())}
    nodes = current.walk()
    pending: list[tuple[LateNodeHook, str]] = []
    for index, walked in enumerate(nodes):
        if walked.node is None or not walked.needed:
            continue
        post, pre = _hooks_of(walked.node.register_hook), _hooks_of(walked.node.register_prehook)
        for late in added:
            if late.hooks is not post and late.hooks is not pre:
                continue
            distance = positions[index] - positions[late.node]
            own = late.phase != _POST_HOOK if late.hooks is post else late.phase == _TENSOR_PRE_HOOK
            if (distance > 0 or (distance == 0 and own)) and late.handle.id in late.hooks:
                pending.append((late, walked.name))
    for late, _ in pending:
        late.handle.remove()
    if pending:
        late, name = pending[0]
        raise LateHookError(name, nodes[late.node].name)
