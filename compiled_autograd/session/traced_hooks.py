"""Hooks that are registered inside of a compiled function.

Dynamo can leave such a hook to whoever captures the backward pass: the function's graph then has one more input, a
``BackwardState`` that holds the hooks when the forward is over, and its backward graph calls them from there. That
is the only way to have one graph (``fullgraph=True``) of a function with module hooks, or with hooks that change
something; its backward pass runs where it is captured, and nowhere else. Without ``fullgraph`` Dynamo breaks the
graph at such a hook, which works everywhere, and stays so.
"""

from typing import Any

from compiled_autograd import _torch
from compiled_autograd.session.session import sessions


def _is_captured(translator: Any) -> bool:
    captured = sessions.current() is not None or sessions.captures_later
    return captured and _torch.traces_whole(translator)


def trace_tensor_hook(tensor: Any, translator: Any, name: str, hook: Any) -> Any:
    """Dynamo's rule for ``tensor.register_hook``.

    Args:
        tensor: Dynamo's variable for the tensor.
        translator: what translates the frame.
        name: the method's name.
        hook: Dynamo's variable for the hook.

    Returns:
        Dynamo's variable for the handle.
    """
    if not _is_captured(translator):
        return _torch.trace_tensor_hook(tensor, translator, name, hook)
    with _torch.hooks_go_to_backward():
        return _torch.trace_tensor_hook(tensor, translator, name, hook)


@staticmethod  # type: ignore[misc]
def trace_module_hooks(translator: Any, module: Any, hooks: Any, pre_hooks: Any) -> Any:
    """Dynamo's rule for a module with backward hooks.

    Args:
        translator: what translates the frame.
        module: Dynamo's variable for the module.
        hooks: its backward hooks.
        pre_hooks: its backward pre-hooks.
    """
    if not _is_captured(translator):
        return _torch.trace_module_hooks(translator, module, hooks, pre_hooks)
    with _torch.hooks_go_to_backward():
        return _torch.trace_module_hooks(translator, module, hooks, pre_hooks)
