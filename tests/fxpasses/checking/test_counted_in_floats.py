"""Positions and integers that a pass holds in a type of floats: looked at where that type has no room for them."""

from __future__ import annotations

import pytest
import torch

import fxpasses
from fxpasses.testing import prove

aten = torch.ops.aten
NARROW = [torch.float16, torch.bfloat16, torch.float32]


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


def held_in(kind):
    """A pass that holds what comparisons and roots take in a type of floats."""

    @fxpasses.graph_pass(name="floats")
    def floats(gm):
        def cast(value, dtype):
            return gm.graph.call_function(aten._to_copy.default, (value,), {"dtype": dtype})

        taken = [n for n in gm.graph.nodes if n.target in (aten.eq.Tensor, aten.lt.Tensor, aten.sqrt.default)]
        for node in taken:
            with gm.graph.inserting_before(node):
                made = gm.graph.call_function(node.target, tuple(cast(n, kind) for n in node.args))
                made = cast(made, node.meta["val"].dtype)
            node.replace_all_uses_with(made)
            gm.graph.erase_node(node)
        return bool(taken)

    return floats


def masked(x, lengths):
    return torch.where(torch.arange(x.shape[1]) < lengths[:, None], x, 0.0)


def found(ids, others):
    return ids[:, None] == others


def rooted(n):
    return n.double().sqrt().floor().long()


@pytest.mark.parametrize("kind", NARROW)
def test_integers_that_are_compared(kind):
    proof = prove(held_in(kind), found, torch.randint(50, (5,)), torch.tensor([3, 11, 40]))
    assert not proof.ok


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [None, True])
def test_positions_that_are_compared(kind, dynamic):
    size = 9 if dynamic else 3000
    proof = prove(held_in(kind), masked, torch.randn(2, size), torch.tensor([5, 7]), dynamic=dynamic)
    assert not proof.ok


def test_what_has_room_for_all_of_them():
    proof = prove(held_in(torch.float64), masked, torch.randn(2, 9), torch.tensor([5, 7]), dynamic=True)
    assert proof.ok, proof


@pytest.mark.parametrize("kind", NARROW)
def test_roots_of_integers(kind):
    proof = prove(held_in(kind), rooted, torch.randint(50, (6,)))
    assert not proof.ok
