"""Trees of arguments are walked as torch's own functions walk them."""

import collections
import dataclasses

import pytest
import torch
import torch.utils._pytree as torchs
from torch.fx.immutable_collections import immutable_dict, immutable_list

from fake.tracing.containers import tree_iter, tree_map_only

Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass
class Plain:
    value: int


class Sizes(tuple):
    """A subclass of tuple that nobody has registered."""


TREES = [
    1,
    None,
    "text",
    (),
    [],
    {},
    ((1, None, [2.5, {"a": True, 3: (4,)}]), {"k": ()}),
    Pair(1, [2, 3]),
    (Pair(1, Pair(2, 3)), [Pair([4], {})]),
    collections.OrderedDict(b=1, a=(2, 3)),
    collections.defaultdict(list, b=1, a=[2]),
    collections.deque([1, (2, 3)]),
    torch.Size([2, 3]),
    [torch.Size([4]), Sizes((5, 6))],
    torch.return_types.max((1, 2)),
    immutable_list([1, (2, immutable_dict(a=3))]),
    immutable_dict(a=[1], b=Plain(2)),
    [Plain(1), slice(1, 2, None), Ellipsis],
]


@pytest.mark.parametrize("tree", TREES, ids=repr)
def test_leaves_and_changed_trees_are_torchs(tree):
    assert tree_iter(tree) == torchs.tree_leaves(tree)

    def changed(leaf):
        return [leaf]  # what comes back is not walked again

    for classes in (int, (int, str), object, type(tree)):
        ours, theirs = tree_map_only(classes, changed, tree), torchs.tree_map_only(classes, changed, tree)
        assert ours == theirs
        assert [type(leaf) for leaf in tree_iter(ours)] == [type(leaf) for leaf in torchs.tree_leaves(theirs)]
        assert type(ours) is type(theirs)


def test_other_ways_to_say_what_a_leaf_is_are_left_to_torch():
    tree = (1, [2, (3,)])

    def is_list(part):
        return isinstance(part, list)

    assert tree_iter(tree, is_list) == [1, [2, (3,)]]
    assert tree_map_only(list, len, tree, is_leaf=is_list) == (1, 2)
    assert tree_map_only(lambda leaf: leaf == 3, str, tree) == (1, [2, ("3",)])


def test_what_is_registered_later_is_known():
    class Box:
        def __init__(self, content):
            self.content = content

    assert tree_iter(Box(1)) != [1]
    torchs.register_pytree_node(Box, lambda box: ([box.content], None), lambda content, _: Box(*content))
    try:
        assert tree_iter((Box((1, 2)),)) == [1, 2]
        assert tree_map_only(int, str, [Box(1)])[0].content == "1"
    finally:
        del torchs.SUPPORTED_NODES[Box]
        torchs.SUPPORTED_SERIALIZED_TYPES.pop(Box, None)
