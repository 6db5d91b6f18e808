"""Passes in some parts of a graph: repeated layers, and what is around them."""

import pytest
import torch

import fake
import fxpasses
from fxpasses.compiling.options import Options
from fxpasses.pipeline.compile_graph import compile_graph
from fxpasses.tuning.choice import THE_REST, Choice, Step
from fxpasses.tuning.proposals import Proposals, _candidate_settings

aten = torch.ops.aten


def doubly_negated(gm):
    "Negates what tanh and sin give, twice."
    for target in (aten.tanh.default, aten.sin.default):
        for node in gm.graph.find_nodes(op="call_function", target=target):
            users = list(node.users)
            with gm.graph.inserting_after(node):
                one = gm.graph.call_function(aten.neg.default, (node,))
            with gm.graph.inserting_after(one):
                two = gm.graph.call_function(aten.neg.default, (one,))
            for user in users:
                user.replace_input_with(node, two)
    return True


def head_only(gm):
    "Negates what sin gives, twice."
    return doubly_negated(gm) if gm.graph.find_nodes(op="call_function", target=aten.sin.default) else False


TWICE, HEAD = (
    fxpasses.graph_pass(graphs=["inference"], numerics="bitwise")(f) for f in (doubly_negated, head_only)
)


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(4, 4) for _ in range(4))

    def forward(self, x):
        for weight in self.weights:
            x = (x @ weight).tanh()
        return x.sin()


def test_a_pass_is_tried_in_each_place_that_it_changes_and_runs_where_it_is_chosen():
    options = Options.parse({"compiler": "eager", "regions": "always"})
    told, changed = [], []

    def backend(gm, inputs):
        proposals = Proposals(gm, inputs, options, "time", (TWICE, HEAD), (), True)
        everywhere = Choice((Step.of_pass(TWICE),))
        told.append(names(proposals(Choice())))
        told.append(names(proposals(everywhere)))
        known = {"head_only": 0.9, "doubly_negated in the rest": 0.7}
        told.append(
            names(Proposals(gm, inputs, options, "time", (TWICE, HEAD), (), True, known)(Choice()))[:2]
        )
        told.append(names(proposals(everywhere.plus(Step("regions=off", settings={"regions": "off"})))))
        steps = [step for step, _ in proposals(everywhere) if step.places]
        for choice in (Choice(), everywhere, *(everywhere.plus(step) for step in steps)):
            fxpasses.reset_stats()
            compiled = compile_graph(gm, inputs, choice.options(options))
            changed.append((choice, fxpasses.stats().pass_changes.get("doubly_negated", 0)))
        return compiled

    def names(pairs):
        return [step.name for step, _ in pairs if step.item is not None]

    model, x = Layers(), torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    (region,) = {place for choice, _ in changed for s in choice.steps for place in s.places or ()} - {
        THE_REST
    }
    placed = [f"doubly_negated in region {region[:8]}", "doubly_negated in the rest"]
    assert sorted(told[0]) == sorted(["doubly_negated", "head_only", *placed])
    assert sorted(told[1]) == sorted(["head_only", *placed])
    assert told[2] == ["doubly_negated in the rest", "head_only"], "what other graphs gained by"
    assert told[3] == ["head_only"], "there is one place only"
    counts = {str(choice): count for choice, count in changed}
    assert counts == {"default": 0, "doubly_negated": 2, placed[0]: 1, placed[1]: 1}
    step = changed[-1][0].steps[0]
    assert Step.from_data(step.to_data(), lambda text: TWICE) == step


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_options_of_inductor_that_are_tried_depend_on_the_device(device):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(aten.mm.default, (x, x)))
    with fake.FakeTensorMode():
        inputs = [torch.empty(4, 4, device=device)]
    graphs = {"inference": torch.fx.GraphModule({}, graph)}
    tried = [value for _, value in _candidate_settings(graphs, inputs, Options.parse({}), "time", False)]
    wanted = [{"triton.cudagraphs": True}, {"coordinate_descent_tuning": True}, {"max_autotune": True}]
    assert tried == (wanted if device == "cuda" else [])


def test_no_layout_is_tried_that_inductor_chooses_anyway():
    graph = fxpasses.capture(torch.nn.Conv2d(3, 4, 3), torch.randn(1, 3, 4, 4)).forward
    assert graph.graph.find_nodes(op="call_function", target=aten.convolution.default)
    assert not _candidate_settings({"inference": graph}, [torch.randn(1, 3, 4, 4)], Options(), "time", False)
