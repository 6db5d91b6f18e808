"""Hooks registered inside a compiled function.

Dynamo can leave such a hook to whoever captures the backward pass. The function's graph then has one more
input, a ``BackwardState``, which holds the hooks once the forward is over; the backward graph calls them from
there. This is the only way to get one graph (``fullgraph=True``) of a function with module hooks, or with
hooks that have side effects. Such a backward pass runs only where it is captured. Without ``fullgraph`` we
leave Dynamo's graph break at such a hook, which works everywhere.
"""

from typing import Any

from compiled_autograd import _torch
from compiled_autograd.session.session import sessions


def _will_be_captured(translator: Any) -> bool:
    captured = sessions.current() is not None or sessions.captures_later
    return captured and _torch.requires_full_graph(translator)


def trace_tensor_hook(tensor: Any, translator: Any, name: str, hook: Any) -> Any:
    """Trace ``tensor.register_hook``. Replaces Dynamo's rule.

    Args:
        tensor: Dynamo's variable for the tensor.
        translator: the translator of the frame.
        name: the method's name.
        hook: Dynamo's variable for the hook.

    Returns:
        Dynamo's variable for the handle.
    """
    if not _will_be_captured(translator):
        return _torch.trace_tensor_hook(tensor, translator, name, hook)
    with _torch.defer_hooks_to_backward():
        return _torch.trace_tensor_hook(tensor, translator, name, hook)


@staticmethod  # type: ignore[misc]
def trace_module_hooks(translator: Any, module: Any, hooks: Any, pre_hooks: Any) -> Any:
    """Trace a module with backward hooks. Replaces Dynamo's rule.

    Args:
        translator: the translator of the frame.
        module: Dynamo's variable for the module.
        hooks: its backward hooks.
        pre_hooks: its backward pre-hooks.
    """
    if not _will_be_captured(translator):
        return _torch.trace_module_hooks(translator, module, hooks, pre_hooks)
    with _torch.defer_hooks_to_backward():
        return _torch.trace_module_hooks(translator, module, hooks, pre_hooks)
