"""Exact verdicts on graphs that speak with other processes: on a process group that does nothing, as nothing is ever sent."""

import itertools

import pytest
import torch

dist = pytest.importorskip("torch.distributed")
if not dist.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

import torch.distributed._functional_collectives as collectives  # noqa: E402

from fxpasses import capture  # noqa: E402
from fxpasses.checking.comparison.side_by_side import SideBySide  # noqa: E402
from fxpasses.checking.execution.collectives import Group  # noqa: E402
from fxpasses.checking.execution.inputs import inputs_from_hints  # noqa: E402

pytestmark = pytest.mark.usefixtures("fake_group")

X = torch.randn(4, 3)


def reduce(x, kind="sum"):
    return collectives.all_reduce(x, kind, dist.group.WORLD)


def gather(x):
    return collectives.all_gather_tensor(x, 0, dist.group.WORLD)


def scatter(x, kind="sum"):
    return collectives.reduce_scatter_tensor(x, kind, 0, dist.group.WORLD)


def verdict(before, after, dynamic=None):
    first, second = (capture(f, X, dynamic=dynamic, decompose=True).forward for f in (before, after))
    return SideBySide(first, inputs_from_hints(first.graph.find_nodes(op="placeholder"))).equivalent(second)


SAME = {
    "a number before or after a sum": (lambda x: reduce(x * 2), lambda x: reduce(x) * 2),
    "a positive number and a maximum": (lambda x: reduce(x * 2, "max"), lambda x: reduce(x) * 0 + reduce(x, "max") * 2),
    "two sums as one": (
        lambda x: (reduce(x.sin()), reduce(x.cos())),
        lambda x: tuple(reduce(torch.cat([x.sin(), x.cos()])).split(4)),
    ),
    "the sum of parts": (lambda x: reduce(x), lambda x: gather(scatter(x))),
    "what is done with each row": (lambda x: gather(x).exp(), lambda x: gather(x.exp())),
    "a mean of two": (lambda x: reduce(x, "avg"), lambda x: reduce(x) / 2),
    "two sums of two": (lambda x: reduce(reduce(x)), lambda x: reduce(x) * 2),
    "the sum of what is gathered": (lambda x: reduce(x), lambda x: gather(x).view(2, *x.shape).sum(0)),
    "the own part": (lambda x: scatter(x), lambda x: reduce(x)[:2].clone()),
    "minimum as maximum": (lambda x: -reduce(-x, "max"), lambda x: reduce(x, "min")),
}  # fmt: skip
OTHERS = {
    "a mean for a sum": (lambda x: reduce(x), lambda x: reduce(x, "avg")),
    "none": (lambda x: reduce(x), lambda x: x * 1),
    "none of what was summed": (lambda x: reduce(reduce(x)), lambda x: reduce(x) * 1),
    "a function that is not linear": (lambda x: reduce(x).exp(), lambda x: reduce(x.exp())),
    "a number of each process": (lambda x: reduce(x + 1), lambda x: reduce(x) + 1),
    "a negative number and a maximum": (lambda x: reduce(x * -2, "max"), lambda x: reduce(x, "max") * -2),
    "rows of another process": (lambda x: gather(x), lambda x: gather(x).flip(0)),
    "a mean of three": (lambda x: reduce(x, "avg"), lambda x: reduce(x) / 3),
    "the part of the other": (lambda x: scatter(x), lambda x: reduce(x)[2:].clone()),
    "a product": (lambda x: reduce(x * 2, "product"), lambda x: reduce(x, "product") * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("dynamic", [None, True])
def test_the_same_function(name, dynamic):
    found = verdict(*SAME[name], dynamic)
    assert found.kind == "EQUAL", found


@pytest.mark.parametrize("name", OTHERS)
def test_another_function(name):
    found = verdict(*OTHERS[name])
    assert found.kind == "DIFFERENT", found


def test_what_cannot_be_made_up_is_not_run():
    found = verdict(lambda x: reduce(x, "band").long(), lambda x: reduce(x, "band").long() + 0)
    assert found.kind == "UNPROVED", found


def test_who_stands_for_whom():
    """In a job of two by two, groups of either kind cross each other; in larger ones, one stands for several that hold the same."""
    for rank, other in itertools.product(range(2), repeat=2):
        rows, columns = Group(4, 2, rank, 1), Group(4, 2, other, 2)
        for group, process in itertools.product((rows, columns), range(4)):
            members = group.members(process)
            assert members[group.rank_of(process, 2)] == process
            assert all(group.members(member) == members for member in members)
            assert len(set(rows.members(process)) & set(columns.members(process))) == 1
        assert (rows.rank_of(0, 2), columns.rank_of(0, 2)) == (rank, other)
    for size, rank in itertools.product((4, 6, 8), (0, 1, 3)):
        group = Group(4, size, rank)
        assert group.rank_of(0, size) == rank
        assert len({tuple(group.members(process)) for process in range(4)}) == 1
        assert all(group.members(process)[group.rank_of(process, size)] == process for process in range(4))
