"""``torch.utils._pytree``: flatten arguments and results, and rebuild them."""

from __future__ import annotations

from torch.utils._pytree import (
    SUPPORTED_NODES,
    TreeSpec,
    arg_tree_leaves,
    tree_flatten,
    tree_flatten_with_path,
    tree_iter,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)
