import pytest
import torch

import fxpasses
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
