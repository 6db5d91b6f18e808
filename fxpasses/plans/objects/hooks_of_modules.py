"""The attributes of a module that hold its hooks."""

from __future__ import annotations

HOOKS_OF_CALLS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module has hooks that its call runs."""
HOOKS_BESIDE = (
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
"""Details of these hooks, and other hooks. Changes there do not affect calls while the first are empty."""
ALL_HOOKS = (*HOOKS_OF_CALLS, *HOOKS_BESIDE)
