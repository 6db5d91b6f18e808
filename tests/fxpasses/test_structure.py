"""The structure check on outputs and metadata, whom it blames, and what it leaves alone."""

from __future__ import annotations

import re

import pytest
import torch
from torch import fx

import fxpasses
from fake import FakeTensorMode
from fxpasses import PassManager, StructureError, claim, graph_pass, insert_call
from fxpasses.graphs.rewriting import copy_graph
from fxpasses.passes import default_passes
from tests.fxpasses.structure_support import X, accepted, aten, draws, find, rejected, writes_between
from tests.fxpasses.support import text, traced

# --- outputs and metadata


def test_outputs_exchanged():
    def exchanges_outputs(gm):
        (output,) = gm.graph.find_nodes(op="output")
        output.args = (tuple(reversed(output.args[0])),)
        return True

    error = rejected(exchanges_outputs, traced(lambda x: (x.sin(), x.cos()), X))
    assert error.problem == "outputs"
    assert "is output 1 now" in error.reason


def test_inputs_exchanged():
    def exchanges_inputs(gm):
        first, second = gm.graph.find_nodes(op="placeholder")
        second.append(first)
        return True

    error = rejected(exchanges_inputs, traced(lambda x, y: x - y, X, X))
    assert error.problem == "inputs"


def test_an_output_dropped():
    def drops_an_output(gm):
        (output,) = gm.graph.find_nodes(op="output")
        output.args = (output.args[0][:1],)
        return True

    error = rejected(drops_an_output, traced(lambda x: (x.sin(), x.cos()), X))
    assert error.problem == "outputs"
    assert "returned 2 values before and returns 1" in error.reason


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda gm, n: insert_call(
                gm.graph, aten._to_copy.default, (n,), {"dtype": torch.float64}, like=n
            ),
            "dtype",
        ),
        (lambda gm, n: insert_call(gm.graph, aten.unsqueeze.default, (n, 0), like=n), "shape"),
        (lambda gm, n: insert_call(gm.graph, aten.as_strided.default, (n, [3, 4], [1, 3]), like=n), "stride"),
    ],
)
def test_metadata_of_an_output(change, named):
    def changes_an_output(gm):
        (output,) = gm.graph.find_nodes(op="output")
        with gm.graph.inserting_before(output):
            output.args = ((change(gm, output.args[0][0]),),)
        return True

    error = rejected(changes_an_output, traced(lambda x: x.sin(), X))
    assert error.problem == "outputs"
    assert named in error.reason


def computes_twice(x):
    return (x.sin() * 2).sum()


def narrow(gm):
    "sin in bfloat16, and everything below it too."
    node = find(gm, aten.mul.Tensor)
    with gm.graph.inserting_before(node):
        small = insert_call(
            gm.graph, aten._to_copy.default, (node.args[0],), {"dtype": torch.bfloat16}, like=node
        )
    node.args = (small, 2)
    total = find(gm, aten.sum.default)
    with gm.graph.inserting_before(total):
        total.args = (
            insert_call(gm.graph, aten._to_copy.default, (node,), {"dtype": torch.float32}, like=node),
        )
    return True


def test_a_node_that_stays_in_another_type():
    error = rejected(narrow, traced(computes_twice, X))
    assert error.problem == "metadata"
    assert error.location.node == "mul"
    assert "bfloat16" in error.reason
    accepted(narrow, traced(computes_twice, X), metadata="outputs")


def transpose(gm):
    "Compute the sine of the transpose, in memory of another layout."
    sine = find(gm, aten.sin.default)
    with gm.graph.inserting_before(sine):
        turned = insert_call(gm.graph, aten.t.default, (sine.args[0],), like=sine)
        plain = insert_call(
            gm.graph, aten.clone.default, (turned,), {"memory_format": torch.contiguous_format}, like=sine
        )
        back = insert_call(gm.graph, aten.t.default, (plain,), like=sine)
    sine.args = (back,)
    return True


def test_a_node_that_stays_with_other_strides():
    error = rejected(transpose, traced(computes_twice, X), metadata="exact")
    assert error.problem == "metadata"
    assert "stride" in error.reason
    accepted(transpose, traced(computes_twice, X), metadata="types")


@pytest.mark.parametrize("lie", ["dtype", "shape", "stride"])
def test_metadata_that_is_not_true(lie):
    def lies(gm):
        node = find(gm, aten.sin.default)
        value = node.meta["val"]
        with value.fake_mode:
            told = {
                "dtype": value.double(),
                "shape": value.new_empty(4, 3),
                "stride": torch.empty_strided((3, 4), (1, 3)),
            }[lie]
        with gm.graph.inserting_before(node):
            new = gm.graph.call_function(aten.cos.default, node.args)
        new.meta = {**node.meta, "val": told}
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        return True

    error = rejected(lies, traced(computes_twice, X))
    assert error.problem == "metadata"
    assert error.location.node.startswith("cos")
    assert lie in error.reason


def test_an_output_that_shares_memory_with_an_input_now():
    def drops_the_clone(gm):
        node = find(gm, aten.clone.default)
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)
        return True

    error = rejected(drops_the_clone, traced(lambda x: x.clone(), X))
    assert error.problem == "aliasing"
    assert "had memory of its own before, and shared memory with input 'x_1' now" in error.reason


def test_outputs_that_share_memory_now():
    def function(x):
        return x.sin().view(12), x.sin()

    def merges(gm):
        first, second = (find(gm, aten.sin.default, i) for i in (0, 1))
        second.replace_all_uses_with(first)
        gm.graph.erase_node(second)
        return True

    error = rejected(merges, traced(function, X))
    assert error.problem == "aliasing"
    assert "output 0" in error.reason


def test_a_graph_that_is_not_well_formed():
    def breaks_the_order(gm):
        find(gm, aten.mul.Tensor).append(find(gm, aten.sin.default))
        return True

    assert rejected(breaks_the_order, traced(computes_twice, X)).problem == "lint"


def test_a_node_beside_one_that_was_erased_is_in_the_graph_only_one_way():
    def inserts_there(gm):
        node = find(gm, aten.sin.default)
        (taken,) = node.args
        with gm.graph.inserting_before(node):
            node.replace_all_uses_with(insert_call(gm.graph, aten.cos.default, (taken,), like=node))
            gm.graph.erase_node(node)
            insert_call(gm.graph, aten.neg.default, (taken,), like=node)
        return True

    error = rejected(inserts_there, traced(lambda x: x.sin(), X))
    assert error.problem == "lint"
    assert "before others are erased" in str(error)


# --- blame


@pytest.mark.parametrize("planted", ["copy", "metadata", "order"])
def test_the_users_line_is_named(planted):
    def copies(x):
        return torch.rand_like(x) + x, torch.rand_like(x).clone(), x.clone()  # the line

    def plants(gm):
        first, second = gm.graph.find_nodes(op="call_function", target=aten.rand_like.default)
        clones = gm.graph.find_nodes(op="call_function", target=aten.clone.default)
        if planted == "copy":
            clones[-1].replace_all_uses_with(clones[-1].args[0])
        elif planted == "metadata":
            clones[0].meta["val"] = clones[0].meta["val"].double()
        else:
            first.prepend(second)
        return True

    with torch.no_grad():
        with pytest.raises(StructureError) as caught:
            fxpasses.capture(copies, X, passes=[graph_pass(plants, graphs="any")], decompose=False)
    assert __file__ in caught.value.location.source
    assert "# the line" in caught.value.location.source


def test_the_match_site_is_named():
    def function(x):
        for i in range(5):
            x = (x + i).sin()
        return x

    def wrong_at_one_site(gm):
        for index, node in enumerate(gm.graph.find_nodes(op="call_function", target=aten.sin.default)):
            if claim(node):
                node.target = aten.cos.default if index != 3 else aten.sign.default
                if index == 3:
                    node.meta["val"] = node.meta["val"].double()
        return True

    error = rejected(wrong_at_one_site, traced(function, X))
    assert error.site == 3
    assert re.search(r"site 3: node 'sin_3'", str(error))


def test_the_site_of_a_new_node_is_named():
    def function(x):
        for _ in range(4):
            x = x.sin() + 1
        return x

    def wrong_at_one_site(gm):
        for index, node in enumerate(gm.graph.find_nodes(op="call_function", target=aten.sin.default)):
            claim(node)
            with gm.graph.inserting_before(node):
                new = insert_call(gm.graph, aten.tanh.default, node.args, like=node)
                if index == 2:
                    new = insert_call(
                        gm.graph, aten._to_copy.default, (new,), {"dtype": torch.float16}, like=node
                    )
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)
        return True

    error = rejected(wrong_at_one_site, traced(function, X))
    assert error.location.node == "add_2"
    assert error.site == 2


def test_functions_of_torch_get_their_values_too():
    def calls_torch(gm):
        node = find(gm, aten.sin.default)
        with gm.graph.inserting_before(node):
            new = gm.graph.call_function(torch.cos, node.args)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        return True

    gm = traced(computes_twice, X)
    accepted(calls_torch, gm)
    assert find(gm, torch.cos).meta["val"].shape == (3, 4)


def test_the_check_can_be_left_out():
    def function(x):
        return x.clone()

    def drops_the_clone(gm):
        node = find(gm, aten.clone.default)
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)
        return True

    item = graph_pass(drops_the_clone)
    PassManager([item], structure=False).run(traced(function, X), "inference")
    with pytest.raises(StructureError):
        PassManager([item]).run(traced(function, X), "inference")


# --- no false alarms


def test_a_graph_that_is_replaced_by_a_new_one():
    def rebuilds(gm):
        gm.graph = copy_graph(gm).graph
        return True

    for function in (writes_between, draws, split_and_join, computes_twice):
        accepted(rebuilds, traced(function, X))

    def drops_a_draw(gm):
        rebuilds(gm)
        first, second = gm.graph.find_nodes(op="call_function", target=aten.rand_like.default)
        second.replace_all_uses_with(first)
        gm.graph.erase_node(second)
        return True

    assert "is gone" in rejected(drops_a_draw, traced(draws, X)).reason


def batch_norm(x, mean, variance, weight):
    y = torch.nn.functional.batch_norm(x, mean, variance, weight, training=True)
    mean_was = mean.clone()
    return y.relu(), mean_was + 1


def split_and_join(x):
    a, b = x.split(2, 1)
    a.mul_(2)
    return torch.cat([b, a], 1)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (writes_between, (X,)),
        (split_and_join, (X,)),
        (batch_norm, (X, torch.zeros(4), torch.ones(4), torch.ones(4))),
        (draws, (X,)),
        (computes_twice, (X,)),
    ],
)
def test_the_default_passes_raise_no_alarm(function, inputs, dynamic):
    gm = traced(function, *(x.clone() for x in inputs), dynamic=dynamic)
    plain = copy_graph(gm)
    PassManager(default_passes()).run(gm, "inference")
    results = []
    for graph in (plain, gm):
        torch.manual_seed(0)
        given = [x.clone() for x in inputs]
        results.append([*graph(*given), *given])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.slow
def test_a_joint_graph_of_a_model_raises_no_alarm():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Dropout(0.5)
    )
    captured = fxpasses.capture(model, torch.randn(2, 3, 8, 8), decompose=True, dynamic=False)
    gm = copy_graph(captured.joint)
    runs = PassManager(default_passes()).run(gm, "joint")
    assert any(run.changed for run in runs)
    assert isinstance(gm, fx.GraphModule)
    assert text(gm)


def test_a_constant_that_holds_no_data_is_told():
    captured = fxpasses.capture(lambda x: x * torch.tensor([1.0, 2.0]), torch.ones(2)).forward

    @fxpasses.graph_pass
    def makes_another(gm):
        (node,) = gm.graph.find_nodes(op="get_attr")
        with FakeTensorMode():  # as while a graph is traced
            setattr(gm, node.target, torch.ones(2))
        return True

    with pytest.raises(fxpasses.errors.StructureError, match="is a fake tensor, which holds no data"):
        PassManager([makes_another]).run(captured, "inference")
