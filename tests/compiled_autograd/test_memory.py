"""What stays when captured graphs are forgotten: nothing that grows with them, nor with their number."""

import collections
import gc

import pytest
import torch

import compiled_autograd
from compiled_autograd import config
from tests.compiled_autograd.support import flat, keep

pytestmark = pytest.mark.usefixtures("old_objects_aside")


def products(count: int) -> None:
    weight = torch.ones(2, requires_grad=True)
    torch.stack([weight * float(i % 5) for i in range(count)]).sum().backward()


def counts() -> collections.Counter[type]:
    gc.collect()
    return collections.Counter(type(found) for found in gc.get_objects())


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [keep, flat])
def test_a_hundred_captures_leave_nothing_behind(compiler):
    def capture(size):
        with compiled_autograd.enable(compiler):
            products(size)
        assert compiled_autograd.stats().captures == 1
        compiled_autograd.reset()

    for size in (18, 19):
        capture(size)
    before = counts()
    for size in range(20, 120):
        capture(size)
    grown = counts() - before
    assert not [kind for kind in grown if kind.__module__.startswith(("torch", "compiled_autograd"))], grown
    if compiler is keep:  # another one reads the code of graphs, whose lines Python's `linecache` keeps
        assert max(grown.values(), default=0) < 50, grown


def test_graphs_beyond_the_limit_are_forgotten():
    def nodes_of_graphs():
        return counts()[torch.fx.Node]

    with config.patch(keep_nodes=20), compiled_autograd.enable(keep):
        products(30)
        first = nodes_of_graphs()
        for size in (31, 32, 33):
            products(size)
        assert nodes_of_graphs() < 2 * first
        assert compiled_autograd.stats().captures == 4
        products(33)  # forgotten as well: it is captured again
        assert compiled_autograd.stats().captures == 5


def test_graphs_that_torch_forgets_are_forgotten():
    torch._dynamo.reset()
    others = counts()[torch.fx.Node]  # of graphs that other tests have made
    with compiled_autograd.enable(keep):
        products(30)
        torch._dynamo.reset()  # empties the cache that both share
        products(3)
        assert counts()[torch.fx.Node] - others < 60
        products(30)
    assert compiled_autograd.stats().captures == 3
