"""The structure check on reads, writes, effects and RNG calls."""

from __future__ import annotations

import operator

import torch

from fxpasses import insert_call
from tests.fxpasses.structure_support import X, accepted, aten, draws, find, rejected, writes_between
from tests.fxpasses.support import traced

# --- memory: reads and writes


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


def test_asking_for_a_size_is_no_read():
    def function(x):
        y = x.sin()
        x.add_(1)
        return y + torch.zeros_like(y)

    def asks_the_input(gm):
        node = find(gm, aten.zeros_like.default)
        node.args = (gm.graph.find_nodes(op="placeholder")[0],)
        return True

    accepted(asks_the_input, traced(function, X))


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


def test_a_new_assertion_is_a_question_of_values():
    def adds(target, arguments):
        def apply(gm):
            sine = find(gm, aten.sin.default)
            with gm.graph.inserting_before(sine):
                gm.graph.call_function(target, arguments(sine.all_input_nodes[0]))
            return True

        return apply

    asserts = adds(aten._assert_tensor_metadata.default, lambda x: (x, None, None, torch.float32))
    accepted(asserts, traced(torch.sin, X))
    error = rejected(adds(aten._print.default, lambda x: ("here",)), traced(torch.sin, X))
    assert error.problem == "order"
    assert "effect is new" in error.reason


def test_an_assertion_that_is_made_again_beside_a_new_one():
    def function(x):
        torch._assert_async((x > -5).all(), "too small")
        return x.sin()

    def made_again(times):
        def apply(gm):
            old = find(gm, aten._assert_async.msg)
            with gm.graph.inserting_before(old):
                for _ in range(times):
                    gm.graph.call_function(aten._assert_async.msg, old.args)
            return gm.graph.erase_node(old) or True

        return apply

    for times in (1, 2):
        accepted(made_again(times), traced(function, X))
    assert "effect is gone" in rejected(made_again(0), traced(function, X)).reason
