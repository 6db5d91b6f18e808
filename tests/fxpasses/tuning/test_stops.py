"""Tuning that is stopped, by Ctrl-C or by its time limit: what is kept, and what a later one does."""

import pytest
import torch
from torch import fx

import fxpasses
from fxpasses.compiling.options import Options
from fxpasses.exact.time_limit import OutOfTime, raise_if_out_of_time, time_limit
from fxpasses.tuning import tuned_graph as module
from fxpasses.tuning.choice import Choice
from fxpasses.tuning.intervals import Interval
from fxpasses.tuning.tuned_graph import tuned_graph, valid_choice
from fxpasses.tuning.tuning_session import Session


def test_checks_stop_when_the_time_is_up():
    x = torch.ones(3)
    with time_limit(-1.0), pytest.raises(OutOfTime):
        fxpasses.check(torch.nn.Linear(3, 2), x, options={"compiler": "eager"}, show=False)
    raise_if_out_of_time()  # the limit was for the check


def test_what_was_interrupted_goes_on_the_next_time(tmp_path, monkeypatch):
    gm, inputs = fx.symbolic_trace(lambda x: (x * 2,)), [torch.ones(3)]
    for node in gm.graph.nodes:
        node.meta["example_value"] = torch.ones(3)
    measured = []

    def duel(*programs, **how):
        measured.append(programs)
        if len(measured) > 1:
            raise KeyboardInterrupt
        return Interval(1.0, 1.0, 1.0)

    monkeypatch.setattr(module, "duel", duel)
    monkeypatch.setattr(module._GraphWorkbench, "expected_seconds", lambda self, step: 0.0)
    items = tuple(fxpasses.graph_pass(_add_zero, name=name, graphs=["inference"]) for name in ("a", "b"))
    one = Session(cache=str(tmp_path), passes=items)
    with torch.no_grad():
        options = Options.parse({"compiler": "eager"})
        tuned_graph(gm, inputs, options, one, lambda gm, inputs, options: gm.forward)(*inputs)
    kept, _ = one.locations[0].read()
    assert [(entry.step, entry.outcome) for entry in kept.entries] == [("a", "no gain")]
    assert (one.interrupted, "b" in kept.left) == (True, True)
    assert valid_choice(kept, Session(passes=items)) is None, (
        "the same time is more than an interrupted tuning had"
    )
    assert valid_choice(kept, Session(accepts_any_candidates=True)) == Choice(), "options use what was found"


def _add_zero(gm):
    "Adds zero to what is returned."
    (output,) = gm.graph.find_nodes(op="output")
    for node in output.all_input_nodes:
        with gm.graph.inserting_before(output):
            output.replace_input_with(node, gm.graph.call_function(torch.ops.aten.add.Tensor, (node, 0.0)))
    return True


def test_a_model_that_dynamo_makes_no_graph_of_is_not_called_tuned(tmp_path):
    relu = torch.compiler.disable(torch.relu)
    tuned = fxpasses.tune(lambda x: relu(x), torch.ones(3), seconds=0, cache=tmp_path, show=False)
    assert tuned.graphs == ()
    assert "no graph" in tuned.untuned[0]
    assert "no graph" in str(tuned)
