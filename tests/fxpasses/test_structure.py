"""The structure check: wrong passes are caught by name, correct ones are left alone."""

from __future__ import annotations

import operator
import re

import pytest
import torch
from torch import fx

import fxpasses
from fxpasses import PassManager, StructureError, claim, graph_pass, insert_call
from fxpasses.checking.structure import StructureCheck
from fxpasses.passes import default_passes
from fxpasses.rewriting import copy_graph
from tests.fxpasses.support import text, traced

aten = torch.ops.aten
X = torch.linspace(-1, 1, 12).reshape(3, 4)


def find(gm, target, index=0):
    return gm.graph.find_nodes(op="call_function", target=target)[index]


def rejected(rewrite, gm, kind="inference", **contract):
    """Run a pass that has to be rejected; returns the error."""
    item = graph_pass(rewrite, graphs="any", **contract)
    with pytest.raises(StructureError) as caught:
        PassManager([item]).run(gm, kind)
    assert caught.value.pass_name == rewrite.__name__
    assert rewrite.__name__ in str(caught.value)
    return caught.value


def accepted(rewrite, gm, kind="inference", **contract):
    (run,) = PassManager([graph_pass(rewrite, graphs="any", **contract)]).run(gm, kind)
    assert run.changed
    return run


# --- memory: reads and writes


def writes_between(x):
    y = x * 2
    copied = x.clone()
    x.add_(1)
    return y, copied * 3, x.sin()


def test_a_copy_that_was_needed():
    def drops_the_clone(gm):
        node = find(gm, aten.clone.default)
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)
        return True

    error = rejected(drops_the_clone, traced(writes_between, X))
    assert error.problem == "stale alias"
    assert "copy" in error.reason


def test_a_read_moved_behind_a_write():
    def moves_the_read(gm):
        find(gm, aten.add_.Tensor).append(find(gm, aten.mul.Tensor))
        return True

    assert rejected(moves_the_read, traced(writes_between, X)).problem == "stale alias"


def test_a_read_moved_before_a_write():
    def moves_the_read(gm):
        sine, write = find(gm, aten.sin.default), find(gm, aten.add_.Tensor)
        sine.args = (write.args[0],)
        write.prepend(sine)
        return True

    assert rejected(moves_the_read, traced(writes_between, X)).problem == "stale alias"


def test_a_read_through_a_view_moved_behind_a_write():
    def function(x):
        row = x[0].unsqueeze(0)
        y = row * 2
        x.mul_(3)
        return y

    def moves_the_read(gm):
        find(gm, aten.mul_.Tensor).append(find(gm, aten.mul.Tensor))
        return True

    assert rejected(moves_the_read, traced(function, X)).problem == "stale alias"


def test_computing_in_place_where_the_old_value_is_still_read():
    def function(x):
        a = x.sin()
        b = a.add(1)
        return b.cos(), a.exp()

    def reuses_memory(gm):
        add = find(gm, aten.add.Tensor)
        add.target = aten.add_.Tensor
        return True

    error = rejected(reuses_memory, traced(function, X))
    assert error.problem == "stale alias"
    assert error.location.node == "exp"


def test_computing_in_place_where_nobody_reads_the_old_value():
    def function(x):
        return x.sin().add(1).cos()

    def reuses_memory(gm):
        find(gm, aten.add.Tensor).target = aten.add_.Tensor
        return True

    accepted(reuses_memory, traced(function, X))


def test_writing_to_an_input_that_was_only_read():
    def writes_to_the_input(gm):
        find(gm, aten.add.Tensor).target = aten.add_.Tensor
        return True

    error = rejected(writes_to_the_input, traced(lambda x: x.add(1).cos(), X))
    assert error.problem == "mutation"
    assert "written to now" in error.reason


def test_a_write_to_an_input_left_out():
    def function(x):
        y = x.sin()
        x.copy_(y)
        return y * 2

    def drops_the_write(gm):
        gm.graph.erase_node(find(gm, aten.copy_.default))
        return True

    error = rejected(drops_the_write, traced(function, X))
    assert error.problem == "mutation"
    assert "not written to any more" in error.reason


def test_two_writes_to_an_input_exchanged():
    def function(x):
        y, z = x.sin(), x.cos()
        x.copy_(y)
        x.copy_(z)
        return y + z

    def exchanges(gm):
        first, second = gm.graph.find_nodes(op="call_function", target=aten.copy_.default)
        second.args = (first.args[0], second.args[1])
        second.append(first)
        return True

    error = rejected(exchanges, traced(function, X))
    assert error.problem == "stale alias"


def test_simplifying_away_a_read_is_no_stale_read():
    def function(x):
        y = x * 0
        x.add_(1)
        return y + x.sin()

    def multiplies_by_zero(gm):
        node = find(gm, aten.mul.Tensor)
        with gm.graph.inserting_before(node):
            zeros = insert_call(gm.graph, aten.zeros_like.default, (node.args[0],), like=node)
        node.replace_all_uses_with(zeros)
        gm.graph.erase_node(node)
        return True

    accepted(multiplies_by_zero, traced(function, X))


def test_a_write_replaced_by_another_one():
    def function(x):
        x.copy_(x + 1)
        return x.sin()

    def adds_in_place(gm):
        copy = find(gm, aten.copy_.default)
        added = copy.args[1]
        with gm.graph.inserting_before(copy):
            new = insert_call(gm.graph, aten.add_.Tensor, added.args, like=copy)
        copy.replace_all_uses_with(new)
        gm.graph.erase_node(copy)
        gm.graph.erase_node(added)
        return True

    accepted(adds_in_place, traced(function, X))


# --- effects and random numbers


def draws(x):
    a = torch.rand_like(x)
    b = torch.rand_like(x)
    return a * x, b + x


def test_random_numbers_in_another_order():
    def exchanges_draws(gm):
        find(gm, aten.rand_like.default, 1).append(find(gm, aten.rand_like.default))
        for node in gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
            find(gm, aten.rand_like.default, 1).append(node)
        return True

    error = rejected(exchanges_draws, traced(draws, X))
    assert error.problem == "order"
    assert "random numbers" in error.reason
    assert error.location.node.startswith("rand_like")


def test_one_draw_used_twice():
    def merges_draws(gm):
        first, second = (find(gm, aten.rand_like.default, i) for i in (0, 1))
        second.replace_all_uses_with(first)
        gm.graph.erase_node(second)
        return True

    error = rejected(merges_draws, traced(draws, X))
    assert "is gone" in error.reason
    accepted(merges_draws, traced(draws, X), numerics="none")


def test_a_draw_of_another_shape():
    def draws_less(gm):
        node = find(gm, aten.rand_like.default)
        with gm.graph.inserting_before(node):
            row = insert_call(gm.graph, aten.select.int, (node.args[0], 0, 0), like=node)
            one = insert_call(gm.graph, aten.rand_like.default, (row,), like=node)
            new = insert_call(gm.graph, aten.expand.default, (one, [3, 4]), like=node)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        return True

    assert "not the same" in rejected(draws_less, traced(draws, X)).reason


def test_attention_without_dropout_draws_nothing():
    def function(q, k, v):
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ v

    def uses_the_fused_operator(gm):
        softmax = find(gm, aten._softmax.default)
        output = list(gm.graph.nodes)[-1]
        q, k, v = gm.graph.find_nodes(op="placeholder")
        (old,) = output.args[0]
        flash = aten._scaled_dot_product_flash_attention_for_cpu.default
        with gm.graph.inserting_before(output):
            both = insert_call(gm.graph, flash, (q, k, v), {"scale": 1.0}, like=softmax)
            new = insert_call(gm.graph, operator.getitem, (both, 0), like=softmax)
            if new.meta["val"].stride() != old.meta["val"].stride():
                new = insert_call(gm.graph, aten.contiguous.default, (new,), like=softmax)
        output.args = ((new,),)
        return gm.graph.eliminate_dead_code() or True

    accepted(uses_the_fused_operator, traced(function, *[torch.randn(1, 2, 4, 8) for _ in range(3)]))


def test_a_dropped_effect():
    def function(x):
        torch._assert_async((x > -5).all(), "too small")
        return x.sin()

    def drops_the_assertion(gm):
        gm.graph.erase_node(find(gm, aten._assert_async.msg))
        return True

    error = rejected(drops_the_assertion, traced(function, X))
    assert error.problem == "order"
    assert "effect is gone" in error.reason


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
        (
            lambda gm, n: insert_call(gm.graph, aten.as_strided.default, (n, [3, 4], [1, 3]), like=n),
            "stride",
        ),
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
            fxpasses.capture(copies, X, passes=[graph_pass(plants, graphs="any")])
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


def test_the_check_can_be_left_out_and_called_as_any_other():
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
        PassManager([item], [StructureCheck()], structure=False).run(traced(function, X), "inference")


# --- no false alarms


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
