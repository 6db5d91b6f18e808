import pytest
import torch

import fxpasses
from fake.wrong_arguments import ArgumentTypeError
from fxpasses import insert_call

aten = torch.ops.aten


def doubled(function, *inputs):
    """The forward graph with its result viewed in the shape that it has, and what that gives."""
    captured = fxpasses.capture(function, *inputs, dynamic=True)
    graph = captured.forward.graph
    (output,) = graph.find_nodes(op="output")
    (result,) = output.all_input_nodes
    with graph.inserting_before(output):
        new = insert_call(graph, aten.view.default, (result, list(result.meta["val"].shape)), like=result)
    output.replace_input_with(result, new)
    captured.forward.recompile()
    return captured.forward, new


def test_symbolic_sizes_become_inputs():
    gm, new = doubled(lambda x: x.exp(), torch.ones(3, 4))
    assert [size.op for size in new.args[1]] == ["placeholder", "placeholder"]
    assert gm(5, 6, torch.zeros(5, 6))[0].shape == (5, 6)


def test_a_size_that_no_input_holds():
    with pytest.raises(ValueError, match="is no input of the graph"):
        doubled(lambda x: torch.cat([x, x]), torch.ones(3, 4))


@torch.compiler.nested_compile_region
def marked(x, y):
    return (x * y).sin() + x.sum(0, keepdim=True)


def marked_calls(x, y):
    for _ in range(3):
        x = marked(x, y)
    return marked(x, y * 2), x


def marked_inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 4, generator=generator).requires_grad_() for _ in range(2)]


def test_arguments_that_a_subgraph_returns_are_used_as_they_are():
    captured = fxpasses.capture(marked_calls, *marked_inputs())
    calls = captured.forward.graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.invoke_subgraph
    )
    assert len(calls) == 4
    for call in calls:
        inner = getattr(captured.forward, call.args[0].target).graph
        (output,) = inner.find_nodes(op="output")
        returned = [i for i, result in enumerate(output.args[0]) if result.op == "placeholder"]
        assert returned  # what is saved
        assert not {item.args[1] for item in call.users} & set(returned)


@pytest.mark.slow
def test_inductor_keeps_what_a_subgraph_returns_of_its_arguments():
    inputs = marked_inputs()
    compiled = torch.compile(marked_calls, backend="fxpasses", options={"cache": "off"})
    results = []
    for call in (marked_calls, compiled):
        first, second = call(*inputs)
        results.append(torch.autograd.grad(first.sum() + (second * 2).sum(), inputs))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("target", "arguments", "error"),
    [
        (aten.mul.Tensor, lambda node, other: (node,), RuntimeError),
        (aten.mm.default, lambda node, other: (node, node), RuntimeError),
        (aten.relu.default, lambda node, other: (other,), ArgumentTypeError),
        (aten.cat.default, lambda node, other: ([node, other],), ArgumentTypeError),
        (aten.mul.Tensor, lambda node, other: (node, torch.ones(3)), ArgumentTypeError),
    ],
)
def test_a_call_that_is_refused_leaves_the_graph(target, arguments, error):
    captured = fxpasses.capture(lambda x: x.exp(), torch.ones(2, 3))
    graph, other = captured.forward.graph, fxpasses.capture(lambda x: x.exp(), torch.ones(2, 3)).forward.graph
    (node,), (of_another,) = (
        g.find_nodes(op="call_function", target=aten.exp.default) for g in (graph, other)
    )
    before = str(graph)
    with graph.inserting_after(node), pytest.raises(error):
        insert_call(graph, target, arguments(node, of_another), like=node)
    assert str(graph) == before
    assert list(of_another.users) == other.find_nodes(op="output")
