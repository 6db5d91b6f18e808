"""Default saved-tensor hooks that user code enters or leaves inside a backward pass.

The engine guards all thread-local state of a pass, so that a ``saved_tensors_hooks`` context that a hook
enters and does not leave (or leaves without having entered) ends with the pass. Our passes run outside the
engine, and watch the two functions that change the stack of default hooks.
"""

from typing import Any

from compiled_autograd import _torch
from compiled_autograd.runtime.running import running


def push(pack: Any, unpack: Any) -> None:
    """Enter default hooks, noting it in the running pass."""
    _torch.push_saved_tensors_hooks(pack, unpack)
    current = running.captured()
    if current is not None:
        current.saved_hooks_changes.append(None)


def pop() -> None:
    """Leave default hooks, noting in the running pass which they were."""
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


def restore(changes: list[Any]) -> None:
    """Undo what a pass did to the stack and did not undo itself."""
    while changes:
        hooks = changes.pop()
        if hooks is None:
            _torch.pop_saved_tensors_hooks()
        else:
            _torch.push_saved_tensors_hooks(*hooks)
