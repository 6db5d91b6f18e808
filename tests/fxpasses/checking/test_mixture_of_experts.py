"""A layer of experts: its tokens are sorted by expert, many alike, into memory that nobody has written yet, for a kernel of few types."""

import pytest
import torch

import fxpasses
from fxpasses.checking.comparison.open_order import tie_dependent_outputs
from fxpasses.checking.comparison.values import Reference, compare, value_names
from fxpasses.checking.execution.interpret import ExactRun
from fxpasses.exact import equivalent

aten = torch.ops.aten
ENDS = torch.tensor([2, 2, 5], dtype=torch.int32)
COLUMNS = {"rows": ((6, 8), (3, 8, 16)), "columns": ((3, 8, 8), (8, 8)), "sums": ((8, 8), (8, 16))}


def layer(factor: float):
    def model(x, gate, experts):
        weights, chosen = (x @ gate).softmax(-1).topk(2)
        order = chosen.flatten().sort().indices
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        each = x.repeat_interleave(2, 0)[order] * experts[chosen.flatten()[order]]
        weights = weights * factor
        return (each[place].view(len(x), 2, -1) * weights[..., None]).sum(1)

    return model


def test_a_factor_of_the_gates_is_another_function_though_tokens_are_sorted():
    torch.manual_seed(0)
    inputs = [torch.randn(6, 4), torch.randn(4, 3), torch.randn(3, 4)]
    before, after = (fxpasses.capture(layer(factor), *inputs).forward for factor in (1.0, 1.0001))
    assert tie_dependent_outputs(before, inputs) == {0}
    assert tie_dependent_outputs(before, inputs, after) == set()
    assert compare(Reference(before, inputs), after, value_names(before, "inference"))
    assert compare(Reference(before, inputs), before, value_names(before, "inference")) == []


@pytest.mark.skipif(not hasattr(aten, "_grouped_mm"), reason="this torch has no such operator")
@pytest.mark.parametrize("name", COLUMNS)
def test_products_of_groups(name):
    torch.manual_seed(1)
    a, b = (torch.randn(size, dtype=torch.bfloat16) for size in COLUMNS[name])

    def grouped(a, b, ends, factor: float = 2.0):
        return aten._grouped_mm(factor * a, b, ends)

    def otherwise(a, b, ends):
        return 2 * aten._grouped_mm(a, b, ends)

    inputs = [a, b, ENDS if name != "sums" else torch.tensor([2, 2, 8], dtype=torch.int32)]
    graphs = [
        fxpasses.capture(f, *inputs).forward
        for f in (grouped, otherwise, lambda a, b, ends: grouped(a, b, ends, 2.001))
    ]
    assert equivalent(graphs[0], graphs[1], inputs).kind == "EQUAL"
    assert equivalent(graphs[0], graphs[2], inputs).kind != "EQUAL"
    run = ExactRun(graphs[0])
    exact = run.results(inputs)
    assert exact is not None
    assert run.max_relative_error == 0.0
    got, stop = grouped(*inputs).double(), int(inputs[2][-1])
    known = {"rows": (slice(stop),), "columns": (slice(None), slice(stop)), "sums": ()}[name]
    torch.testing.assert_close(got[known], exact[0][known], rtol=0.02, atol=0.05)
