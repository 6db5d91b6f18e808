"""What ranks call the functions that go on behind a graph break, whoever wrote what goes before."""

import pytest
import torch
from torch._dynamo.convert_frame import register_bytecode_hook

import fxpasses
from fxpasses.distributed.agreement import _function


def broken_twice(x):
    factors = (x + 1).tolist()
    x = x * factors[0]
    torch._dynamo.graph_break()
    return x.sin() * factors[1]


def branches(x):
    if x.sum() > 0:
        return x.sin()
    return x.cos()


@pytest.fixture
def functions():
    """All that Dynamo compiles, as ranks call it."""
    found = []
    hook = register_bytecode_hook(lambda code, _: found.append((code.co_name, _function(code))))
    yield found
    hook.remove()


def test_a_plan_goes_before(functions, tmp_path):
    for value in (1, 2):
        torch._dynamo.reset()
        x = torch.full((2,), value)
        assert torch.allclose(fxpasses.compile(broken_twice, cache=tmp_path)(x), broken_twice(x))
    (first, plain), (second, behind_plan) = functions[2], functions[-1]
    assert first != second  # else this tests nothing: Dynamo wrote the one inside of the other
    assert plain == behind_plan


def test_branches_are_told_apart(functions):
    compiled = torch.compile(branches, backend="eager")
    for x in (torch.ones(4), -torch.ones(4)):
        compiled(x)
    assert len({of_ranks for _, of_ranks in functions}) == 3
