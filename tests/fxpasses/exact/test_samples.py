"""Families of inputs: each holds what it is named after, however small the example."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fxpasses
from fxpasses.exact.bounds import inputs_at_bounds
from fxpasses.exact.samples import sample_input


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_zeros_of_both_signs(generator, size):
    for _ in range(20):
        value = sample_input(torch.ones(size), "zeros", generator)
        signs = value[value == 0].signbit()
        assert signs.any()
        assert size == 1 or not signs.all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_a_mask_of_integers_is_varied_as_flags(generator, dtype):
    mask = torch.ones(3, 6, dtype=dtype)
    value = sample_input(mask, "random", generator)
    assert value.dtype is dtype
    assert set(value.unique().tolist()) == {0, 1}
    rows = sample_input(mask, "rows", generator)
    assert rows[0].all()
    assert not rows[-1].any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize("shape", [(1, 5), (3, 5), (2, 2, 5)])
def test_flags_that_hold_at_all_places_but_one(generator, dtype, shape):
    rows = sample_input(torch.ones(shape, dtype=dtype), "ties", generator).view(-1, 5)
    assert (rows.sum(-1)[::2] == 4).all()


@pytest.mark.parametrize("example", [[[2, 1]], [[0, 0]], [0, 1, 1]])
def test_other_integers_stay_in_their_range(generator, example):
    example = torch.tensor(example)
    for family in ("random", "rows", "ties"):
        value = sample_input(example, family, generator)
        assert value.min() >= example.min()
        assert value.max() <= example.max()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int8])
def test_integers_are_offsets_in_order_only(generator, dtype):
    example = torch.tensor([3, 9, 5, 7], dtype=dtype)
    values = (sample_input(example, "random", generator) for _ in range(20))
    assert any((value.long().diff() < 0).any() for value in values)


@pytest.mark.parametrize("shape", [(2, 3), (5, 4), (3, 6, 2)])
def test_ties_hold_equal_rows(generator, shape):
    rows = sample_input(torch.randn(shape), "ties", generator).view(-1, shape[-1])
    assert torch.equal(rows[0], rows[1])
    assert len(rows.unique(dim=0)) > 1 or len(rows) == 2


def test_rows_of_one_integer_leave_other_segments_empty(generator):
    segments = torch.arange(1000) % 7
    assert len(sample_input(segments, "rows", generator).unique()) == 1
    rows = sample_input(torch.arange(12).view(3, 4) % 5, "rows", generator)
    assert (rows == rows[:, :1]).all()


def test_integers_that_are_not_contiguous_go_to_the_ends_of_what_the_graph_takes():
    table, given = torch.randn(9, 2), torch.tensor([[3, 1, 4], [2, 0, 4]]).t()
    made = list(inputs_at_bounds(make_fx(lambda t, i: t[i])(table, given), [table, given]))[-1]
    assert (made[1].min(), made[1].max()) == (-9, 8)


def test_labels_that_a_decoder_is_also_given_may_be_ignored():
    def loss(labels, table, logits):
        moved = labels.new_zeros(labels.shape)
        moved[..., 1:] = labels[..., :-1].clone()
        moved.masked_fill_(moved == -100, 0)
        scores = table[moved] + logits
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)

    inputs = [torch.randint(5, (2, 6)), torch.randn(5, 5), torch.randn(2, 6, 5)]
    gm = fxpasses.capture(loss, *inputs).forward
    assert any(bool((values[0] == -100).any()) for values in inputs_at_bounds(gm, inputs))
