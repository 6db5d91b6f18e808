"""Walk tuples, lists and dictionaries of arguments without describing each of them.

``torch.utils._pytree`` looks up a class for each leaf and builds a ``TreeSpec`` for each container, only to
discard it if just the leaves are read or changed. Functionalization does so four times per operator, and a
graph for each node that it creates. While something is traced, those two modules walk Python's own containers
directly; registered types and named tuples are left to torch.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from fake.seam import pytree
from fake.seam.fake_tensor import functional_tensor
from fake.seam.fx import fx_graph
from fake.seam.patches import LEDGER, Patch, When


def _is_left_to_torch(kind: type) -> bool:
    return kind in pytree.SUPPORTED_NODES or issubclass(kind, tuple)


def _collect(tree: Any, leaves: list[Any]) -> None:
    kind = type(tree)
    if kind is tuple or kind is list or kind is dict:
        for child in tree.values() if kind is dict else tree:
            _collect(child, leaves)
    elif _is_left_to_torch(kind):
        leaves.extend(pytree.tree_iter(tree))
    else:
        leaves.append(tree)


def tree_iter(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """Return the leaves of a tree, like torch's functions ``tree_iter`` and ``tree_leaves``."""
    if is_leaf is not None:
        return pytree.tree_leaves(tree, is_leaf)
    leaves: list[Any] = []
    _collect(tree, leaves)
    return leaves


def tree_map_only(
    classes: Any, function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> Any:
    """Do the same as torch's function of this name.

    Args:
        classes: the classes of the leaves to change.
        function: returns the replacement of a leaf.
        tree: nested containers.
        is_leaf: says what else is a leaf.
    """
    if is_leaf is not None or not isinstance(classes, type | tuple):
        return pytree.tree_map_only(classes, function, tree, is_leaf=is_leaf)

    def changed(tree: Any) -> Any:
        kind = type(tree)
        if kind is tuple:
            return tuple([changed(child) for child in tree])
        if kind is list:
            return [changed(child) for child in tree]
        if kind is dict:
            return {key: changed(child) for key, child in tree.items()}
        if _is_left_to_torch(kind):
            return pytree.tree_map_only(classes, function, tree)
        return function(tree) if isinstance(tree, classes) else tree

    return changed(tree)


def _patched_pytree(original: types.ModuleType) -> types.ModuleType:
    """Return a modified copy of torch's module, which other users keep unmodified."""
    made = types.ModuleType(original.__name__, original.__doc__)
    made.__dict__.update(
        vars(original), tree_iter=tree_iter, tree_leaves=tree_iter, tree_map_only=tree_map_only
    )
    return made


PATCHES = LEDGER.add(
    *(
        Patch(
            module,
            "pytree",
            _patched_pytree,
            when=When.COMPILATION,
            lost="time: a class is looked up for each argument of each operator, and a description made of each tuple",
        )
        for module in (functional_tensor, fx_graph)
    )
)
