"""Zero rows of the data, where zero rows of parameters hide what happens."""

import pytest
import torch

import fxpasses

aten = torch.ops.aten


class Angles(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(3, 4) for _ in range(4))

    def forward(self, x, y):
        scaled = sum(w / w.norm(dim=-1, keepdim=True) for w in self.weights)  # not finite for a zero row
        return torch.cos(torch.atan2(y.sum(-1), x.sum(-1))) + scaled.sum()


@fxpasses.graph_pass(graphs=["joint", "inference"])
def by_quotient(gm):
    "Wrong on purpose: x / hypot(x, y) is the cosine of the angle, but not at zero."
    nodes = gm.graph.find_nodes(op="call_function", target=aten.cos.default)
    for node in nodes:
        y, x = node.args[0].args
        with gm.graph.inserting_before(node):
            norm = fxpasses.insert_call(gm.graph, aten.hypot.default, (x, y), {}, like=node)
            new = fxpasses.insert_call(gm.graph, aten.div.Tensor, (x, norm), {}, like=node)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
    return bool(nodes)


def test_a_pole_at_zeros_of_the_data_is_found_beside_one_of_the_parameters(tmp_path):
    torch._dynamo.reset()
    torch.manual_seed(0)
    options = {"passes": [by_quotient], "check": "values", "compiler": "eager", "report": str(tmp_path)}
    compiled = torch.compile(Angles(), backend="fxpasses", options=options)
    with pytest.raises(fxpasses.ValueMismatchError, match="rows in what is no parameter"):
        compiled(torch.randn(3, 4), torch.randn(3, 4))
