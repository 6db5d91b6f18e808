"""Passes that run and find nothing to change: who says so, and why."""

import logging

import pytest
import torch

import fxpasses
from fxpasses.compiling.unmatched import mentioned_operators, never_rewrites

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

aten = torch.ops.aten
LINEAR = (aten.linear.default,)


def replaces(target, graphs=("joint", "inference")):
    def finds(gm):
        found = gm.graph.find_nodes(op="call_function", target=target)
        for node in found:
            node.target = aten.neg.default
        return bool(found)

    return fxpasses.graph_pass(finds, name="finds", graphs=graphs)


def compiled(function, *passes):
    options = {"compiler": "eager", "passes": [*passes, "default"]}
    return torch.compile(function, backend="fxpasses", options=options)


def said(caplog):
    return [r.getMessage() for r in caplog.records if "changed nothing" in r.getMessage()]


def test_a_pass_for_an_operator_that_is_decomposed(caplog):
    gelu = torch.nn.GELU()
    call = compiled(gelu, replaces(aten.gelu.default))
    with caplog.at_level(logging.WARNING, "fxpasses"):
        call(torch.ones(3))
        call(torch.ones(4))
    (message,) = said(caplog)
    assert "'finds'" in message
    assert "inference" in message
    assert "aten.gelu.default" not in str(fxpasses.capture(gelu, torch.ones(3)).forward.graph)
    assert "aten.gelu.default" in str(fxpasses.capture(gelu, torch.ones(3), decompose=False).forward.graph)
    assert "finds" in fxpasses.stats().unmatched


def test_the_operators_that_a_pass_names_are_read_off_its_code(caplog):
    def calls(node):
        return node.target in LINEAR

    @fxpasses.graph_pass
    def fuses(gm):
        ops = torch.ops.aten
        return any(calls(node) or node.target is ops.gelu.default for node in gm.graph.nodes)

    assert set(mentioned_operators(fuses)) == {aten.linear.default, aten.gelu.default}
    with caplog.at_level(logging.WARNING, "fxpasses"):
        compiled(torch.nn.Linear(3, 3), fuses)(torch.ones(2, 3))
    (message,) = said(caplog)
    assert "aten.gelu.default" in message
    assert "aten.linear.default" in message
    assert "decomposed" in message


def test_nothing_is_said_of_a_pass_that_changed_a_graph_or_only_looks(caplog):
    @fxpasses.graph_pass(graphs="any")
    def looks(gm):
        len(gm.graph.nodes)
        return False

    assert never_rewrites(looks)
    assert not never_rewrites(replaces(aten.sin.default))
    with caplog.at_level(logging.WARNING, "fxpasses"):
        compiled(torch.sin, replaces(aten.sin.default), looks)(torch.ones(3))
    assert not said(caplog)
    assert "finds" not in fxpasses.stats().unmatched
    assert fxpasses.stats().pass_runs["finds"] == 1


def test_a_pass_on_the_backward_graph_is_judged_when_that_is_compiled(caplog):
    x = torch.ones(3, requires_grad=True)
    with caplog.at_level(logging.WARNING, "fxpasses"):
        result = compiled(lambda x: x.sin().sum(), replaces(aten.cos.default, "any"))(x)
        result.backward()
    assert not said(caplog)
    torch._dynamo.reset()
    with caplog.at_level(logging.WARNING, "fxpasses"):
        result = compiled(
            lambda x: x.exp().sum(),
            fxpasses.graph_pass(
                lambda gm: bool(gm.graph.find_nodes(op="call_function", target=aten.tan.default)),
                name="late",
                graphs="any",
            ),
        )(x)
        assert not said(caplog)
        result.backward()
    assert len(said(caplog)) == 1


def never_ran(caplog):
    return [r.getMessage() for r in caplog.records if "has not run" in r.getMessage()]


def test_a_pass_on_joint_graphs_of_a_model_without_gradients_never_runs(caplog):
    late = fxpasses.graph_pass(lambda gm: True, name="late", graphs=["backward"])
    only_looks = fxpasses.graph_pass(lambda gm: False, name="only_looks", graphs="joint")
    call = compiled(torch.sin, replaces(aten.sin.default, ["joint"]), late, fxpasses.fixpoint(only_looks))
    with caplog.at_level(logging.WARNING, "fxpasses"):
        call(torch.ones(3))
        call(torch.ones(3, 2))
    assert [message.split("'")[1] for message in never_ran(caplog)] == ["finds", "late", "only_looks"]
    assert "takes joint graphs, and those compiled are inference graphs" in never_ran(caplog)[0]
    assert fxpasses.stats().pass_runs["finds"] == 0
    assert {"finds", "late", "only_looks"} <= set(fxpasses.stats().unmatched)


def test_a_pass_for_inference_never_runs_in_training(caplog):
    x = torch.ones(3, requires_grad=True)
    item = fxpasses.graph_pass(lambda gm: True, name="inferring", graphs="inference")
    with caplog.at_level(logging.WARNING, "fxpasses"):
        compiled(lambda x: x.sin().sum(), item, replaces(aten.cos.default, ["backward"]))(x).backward()
        (message,) = never_ran(caplog)
    assert "takes inference graphs, and those compiled are joint, forward graphs" in message


def test_patterns_on_graphs_that_do_not_come_are_reported_and_default_passes_are_not(caplog):
    item = fxpasses.pattern_pass(
        lambda x: x.sin(),
        lambda x: x.cos(),
        [torch.ones(3)],
        name="to_cos",
        graphs="joint",
        expect_match=False,
    )
    with caplog.at_level(logging.WARNING, "fxpasses"):
        compiled(torch.sin, item)(torch.ones(3))
    (message,) = never_ran(caplog)
    assert "'to_cos'" in message
