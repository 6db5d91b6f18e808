"""Passes of thousands of nodes: deep, wide, with user code at each node. Work grows with their length, and no faster."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import compiled_autograd
from tests.compiled_autograd.support import flat, keep


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def deep(count: int) -> list[torch.Tensor]:
    leaf = total = torch.ones(2, requires_grad=True)
    for _ in range(count):
        total = total * 1.001
    return [leaf, total.sum()]


def wide(count: int) -> list[torch.Tensor]:
    leaf = torch.ones(2, requires_grad=True)
    return [leaf, torch.stack([leaf * float(i % 5) for i in range(count)]).sum()]


def many_leaves(count: int) -> list[torch.Tensor]:
    leaves = [torch.full((2,), float(i % 3), requires_grad=True) for i in range(count)]
    return [*leaves, torch.stack([leaf * leaf for leaf in leaves]).sum()]


def hooked(count: int) -> list[torch.Tensor]:
    leaf = total = torch.ones(2, requires_grad=True)
    for i in range(count):
        total = total * 1.001
        total.register_hook(lambda grad, i=i: grad * (1 + i % 2 * 0.001))
    return [leaf, total.sum()]


def custom(count: int) -> list[torch.Tensor]:
    leaf = total = torch.ones(2, requires_grad=True)
    for i in range(count):
        total = Scale.apply(total, 1 + i % 2 * 0.001)
    return [leaf, total.sum()]


PROGRAMS = [deep, wide, many_leaves, hooked, custom]


def gradients(program: Callable[[int], Any], count: int) -> list[torch.Tensor]:
    *leaves, loss = program(count)
    loss.backward()
    return [leaf.grad for leaf in leaves]


def calls_of(function: Callable[[], Any]) -> int:
    """How many calls and returns Python sees, its own functions and those in C."""
    count = 0

    def event(*_: Any) -> None:
        nonlocal count
        count += 1

    sys.setprofile(event)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("compiler", [keep, flat])
def test_work_grows_with_the_length(program, compiler):
    def calls(count: int) -> int:
        *_, loss = program(count)
        with compiled_autograd.enable(compiler):
            return calls_of(loss.backward)

    calls(10)
    short, long = calls(50), calls(200)
    assert long < 4.2 * short, (short, long)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_long_pass_recurses_nowhere(program):
    expected = gradients(program, 1500)
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(300)
        with compiled_autograd.enable(keep):
            actual = [gradients(program, 1500), gradients(program, 1500)]
    finally:
        sys.setrecursionlimit(limit)
    torch.testing.assert_close(actual, [expected, expected])
    assert compiled_autograd.stats().captures == 1
    assert compiled_autograd.stats().hits == 1


def test_code_is_generated_for_a_graph_that_runs_often():
    seen = []

    def compiler(graph):
        seen.append(graph)
        return graph

    expected = gradients(hooked, 5)
    with compiled_autograd.enable(compiler):
        for _ in range(40):
            torch.testing.assert_close(gradients(hooked, 5), expected)
    (graph,) = seen
    assert not graph._needs_recompile()


def test_a_graph_that_a_compiler_changes_runs_as_changed():
    def doubled(graph):
        for node in graph.graph.find_nodes(
            op="call_function", target=torch._dynamo.compiled_autograd.ops.MulBackward0
        ):
            with graph.graph.inserting_after(node):
                twice = graph.graph.call_function(
                    lambda grads: [None if g is None else g * 2 for g in grads], (node,)
                )
            node.replace_all_uses_with(twice, delete_user_cb=lambda user, twice=twice: user is not twice)
        graph.recompile()
        return graph

    expected = gradients(deep, 3)
    with compiled_autograd.enable(doubled):
        torch.testing.assert_close(gradients(deep, 3), [grad * 8 for grad in expected])


@pytest.mark.parametrize("take", [lambda graph: graph.forward, lambda graph: lambda *args: graph(*args)])
def test_a_compiler_may_take_the_code(take):
    expected = gradients(custom, 5)
    with compiled_autograd.enable(take):
        torch.testing.assert_close(gradients(custom, 5), expected)
