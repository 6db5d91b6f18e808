"""Which sizes of compiled segments are symbolic: those that change, also one after the other, and none on demand."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import compiled_autograd
from tests.compiled_autograd.support import check, flat, fresh

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def dynamo_flat(graph: torch.fx.GraphModule) -> Any:
    return torch.compile(graph, backend="aot_eager")


@pytest.mark.parametrize("compiler", [flat, dynamo_flat])
@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param([(4, 6), (8, 6), (8, 12), (10, 16), (3, 7)], id="one after the other"),
        pytest.param([(1, 6), (2, 6), (3, 6), (5, 6)], id="from one on"),
        pytest.param([(6, 6), (8, 8), (8, 10), (4, 5)], id="equal at first"),
    ],
)
def test_sizes_that_change_become_symbolic(shapes: list[tuple[int, int]], compiler: Any) -> None:
    def function() -> Iterator[Any]:
        torch._dynamo.reset()
        for shape in shapes:
            x = torch.randn(shape, requires_grad=True)
            (x.sin().exp() * x.cos()).sum(0).tanh().sum().backward()
            yield x.grad

    stats = check(function, compiler, captures=1)
    assert not stats.uncompiled_reasons


def test_marks_of_tensors_are_the_users() -> None:
    block = torch.compile(lambda x: x.sin().sin(), backend="aot_eager")
    with fresh(dynamo_flat):
        for size in (2, 4, 6):
            x = torch.randn(size, 3, requires_grad=True)
            torch._dynamo.mark_dynamic(x, 0)
            block(x).sum().backward()
            torch.testing.assert_close(x.grad, x.sin().cos() * x.cos())
            assert x._dynamo_dynamic_indices == {0}
            assert not hasattr(x, "_dynamo_weak_dynamic_indices")
    assert not compiled_autograd.stats().uncompiled_reasons
