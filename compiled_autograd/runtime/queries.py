"""Replacements for ``torch._C``'s queries about the running backward pass.

The engine answers them for its own passes, but knows nothing of a captured graph. So these replace them while
capturing is enabled. Checkpointing, multi-gradient hooks and module trackers use them.
"""

from typing import Any

import torch

from compiled_autograd import _torch
from compiled_autograd.runtime.running import running


def current_graph_task_id() -> int:
    """Return an id of the running pass, or -1 outside of one."""
    current = running.captured()
    return _torch.current_graph_task_id() if current is None else current.graph_task_id


def current_autograd_node() -> Any:
    """Return the autograd node that is running, or None outside of a pass."""
    current = running.captured()
    return _torch.current_autograd_node() if current is None else current.walk()[current.node].node


def current_graph_task_execution_order() -> list[Any]:
    """Return the nodes of the running pass in execution order."""
    current = running.captured()
    if current is None:
        return _torch.current_graph_task_execution_order()
    if torch.autograd.is_multithreading_enabled():
        raise RuntimeError(
            "get_current_graph_task_execution_order expects the current backward to be executed with "
            "multithreading disabled, e.g. by running:\n\nwith torch.autograd.set_multithreading_enabled(False):\n    ..."
        )
    nodes = current.walk()
    order = [nodes[index].node for index in current.execution_order()]
    return [node for node in order if node is not None]


def keeps_graph() -> bool:
    """Whether the running pass keeps its saved tensors. Otherwise compiled code may overwrite them."""
    current = running.captured()
    return _torch.keeps_graph() if current is None else current.keep_graph


def will_execute(node: Any) -> bool:
    """Whether ``node`` runs in this pass."""
    current = running.captured()
    if current is None:
        return _torch.will_engine_execute_node(node)
    if not hasattr(node, "next_functions"):
        raise TypeError(f"_will_engine_execute_node expects an grad_fn, but got {type(node).__name__}")
    for walked in current.walk():
        if walked.node is node:
            if not walked.needed and not walked.node.next_functions:
                raise RuntimeError(
                    "A leaf node was passed to _will_engine_execute_node but we are currently running "
                    "autograd.grad(). This is currently not supported."
                )
            return True
    return False


def remove_hook(handle: Any) -> None:
    """``RemovableHandle.remove``: the running pass must not call a hook once it is removed."""
    if running.stack:
        hooks = handle.hooks_dict_ref()
        hook = None if hooks is None else hooks.get(handle.id)
        if hook is not None:
            running.hook_removed(hook)
    _torch.remove_hook(handle)


def push_saved_hooks(pack: Any, unpack: Any) -> None:
    """Push default saved-tensor hooks, and record that in the running pass."""
    _torch.push_saved_tensors_hooks(pack, unpack)
    current = running.captured()
    if current is not None:
        current.saved_hooks_changes.append(None)


def pop_saved_hooks() -> None:
    """Pop default saved-tensor hooks, and record them in the running pass."""
    current = running.captured()
    if current is None:
        _torch.pop_saved_tensors_hooks()
        return
    changes = current.saved_hooks_changes
    if changes and changes[-1] is None:
        changes.pop()
    else:
        changes.append(_torch.top_saved_tensors_hooks(True))
    _torch.pop_saved_tensors_hooks()


def restore_saved_hooks(changes: list[Any]) -> None:
    """Undo the changes to the stack that a pass made and did not undo itself."""
    while changes:
        hooks = changes.pop()
        if hooks is None:
            _torch.pop_saved_tensors_hooks()
        else:
            _torch.push_saved_tensors_hooks(*hooks)
