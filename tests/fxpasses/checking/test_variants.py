"""Made-up inputs."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fxpasses.checking.integers import compared_constants, free_numbers
from fxpasses.checking.rounding import perturbed_by_ulp
from fxpasses.checking.tolerance import deviation, same_bits
from fxpasses.checking.variants import variants


def traced(f, *inputs):
    return make_fx(f, tracing_mode="fake")(*inputs)


WHOLE = torch.arange(6)


@pytest.mark.parametrize(
    ("f", "free"),
    [
        (lambda n, x: n * 3 - 1, True),
        (lambda n, x: (n.view(2, 3).sum(0) > 2) & (n[0] < 1), True),
        (lambda n, x: torch.where(n > 2, x, 0), True),
        (lambda n, x: torch.div(n, 2, rounding_mode="floor"), True),
        (lambda n, x: torch.div(n * 0 + 7, n, rounding_mode="floor"), False),
        (lambda n, x: x[n], False),
        (lambda n, x: x.index_select(0, n * 1 + 0), False),
        (lambda n, x: x.scatter(0, n, 1.0), False),
        (lambda n, x: torch.nn.functional.embedding(n, x.view(6, 1)), False),
    ],
)
def test_which_whole_numbers_may_be_any(f, free):
    gm = traced(f, WHOLE, torch.rand(6))
    assert bool({n for n in free_numbers(gm) if n.startswith("n")}) == free


def test_variants():
    gm = traced(lambda n, x, y: (n * 2, x + y), WHOLE, torch.rand(6), torch.randn(6))
    given = [WHOLE, torch.rand(6) + 0.1, torch.randn(6)]
    made = {v.label: v for v in variants(gm, given, False, torch.Generator().manual_seed(0))}
    numbers, positive, any_sign = made["multiples of a half, many of them equal, some rows zero"].choices[0]
    assert numbers.abs().max() > 1 << 30
    assert (numbers < 0).any()
    assert bool(((positive * 2) % 1 == 0).all())
    assert bool((positive >= 0).all())
    assert any_sign.unique().numel() < 6
    assert ((any_sign == 0) & any_sign.signbit()).any()  # minus zero
    broken = made["NaN and infinities in places"]
    assert broken.broken
    assert all(bool(v.isnan().any()) for v in broken.choices[0][1:])
    assert torch.equal(given[0], WHOLE)


def test_whole_rows_are_zero_unless_the_graph_cannot_do_with_it():
    gm = traced(lambda x, y: (x.norm(dim=-1), y + 1), torch.randn(5, 6), torch.rand(5, 6))
    given = [torch.randn(5, 6), torch.rand(5, 6) + 0.1]
    made = {v.label: v for v in variants(gm, given, False, torch.Generator().manual_seed(0))}
    first, second, _ = made["multiples of a half, many of them equal, some rows zero"].choices
    assert (first[0] == 0).all(0).any()
    assert (first[0] == 0).all(1).any()
    assert not (first[1] == 0).all(1).any()  # positive numbers may have to be so
    assert not (second[0] == 0).all(1).any()


def masked_look_up(index, x):
    known = index != -100
    return x.gather(0, torch.where(known, index, 0)), known


@pytest.mark.parametrize(
    ("f", "constants"),
    [
        (lambda n, x: torch.where(n == 3, 1, n * 2), (3,)),
        (lambda n, x: (x[n], n.view(2, 3) != 2), (2,)),
        (lambda n, x: (x[n], n != -100), ()),
        (masked_look_up, (-100,)),
        (lambda n, x: (masked_look_up(n, x), n == -7), (-100,)),
        (lambda n, x: (masked_look_up(n, x), x[n]), ()),
        (lambda n, x: n > 3, ()),
    ],
)
def test_constants_that_whole_numbers_are_compared_with(f, constants):
    gm = traced(f, WHOLE, torch.rand(6))
    found = compared_constants(gm)
    assert found == ({gm.graph.find_nodes(op="placeholder")[0].name: constants} if constants else {})


def test_a_label_to_ignore_is_among_the_labels_but_not_the_only_one():
    labels = torch.tensor([1, 2, 0, 3])
    gm = traced(masked_look_up, labels, torch.randn(6))
    made = list(variants(gm, [labels, torch.randn(6)], False, torch.Generator().manual_seed(0)))
    assert made
    for variant in made:
        for numbers, _ in variant.choices:
            assert 1 <= int((numbers == -100).sum()) < 4


def test_numbers_of_few_digits_are_not_moved():
    values = torch.tensor([0.5, -3.0, 96.0, 0.1, float("inf"), 0.0])
    moved = perturbed_by_ulp(values, None, torch.Generator().manual_seed(0))
    assert (moved == values).tolist() == [True, True, True, False, True, True]


def test_minus_zero_is_not_zero_where_bits_count():
    zero = torch.zeros(2)
    assert same_bits(zero, -zero)
    assert not same_bits(zero, -zero, signs=True)
    assert not same_bits(zero + 0j, -(zero + 0j), signs=True)
    assert deviation(zero, zero.double(), [], -zero) is None
    assert deviation(zero, zero.double(), [], -zero, bitwise=True) is not None


def test_a_lenient_comparison_allows_fewer_nan_but_not_more():
    nan = torch.tensor([float("nan"), 1.0])
    finite = torch.tensor([2.0, 1.0])
    assert deviation(nan, nan.double(), [nan], finite, lenient=True) is None
    assert deviation(nan, nan.double(), [nan], finite) is not None
    assert deviation(finite, finite.double(), [finite], nan, lenient=True) is not None


def test_indices_are_negative_where_all_look_ups_count_from_the_end_then():
    def looked_up(x, i, j):
        return x[i], x[j], x.gather(0, j)

    given = [torch.randn(6), torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)]
    gm = traced(looked_up, *given)
    for variant in variants(gm, given, False, torch.Generator().manual_seed(0)):
        for _, either, positive in variant.choices:
            assert -6 <= either.min() < 0 <= positive.min()
            assert gm(given[0], either, positive)


def test_indices_repeat_in_some_draws_only():
    given = [torch.randn(90, 3), torch.tensor([1, 3])]
    gm = traced(lambda x, i: x[i], *given)
    made = [v.choices[0][1] % 90 for v in variants(gm, given, False, torch.Generator().manual_seed(0))]
    repeated = [bool(a == b) for a, b in made]
    assert any(repeated)
    assert not all(repeated)


def test_a_single_index_counts_from_the_front():
    """A position that masks what lies behind it: from the end it would leave nothing to be seen."""
    given = [torch.randn(6), torch.zeros(1, dtype=torch.int64)]
    gm = traced(lambda x, i: x[i], *given)
    for variant in variants(gm, given, False, torch.Generator().manual_seed(0)):
        assert all(position.item() >= 0 for _, position in variant.choices)


def test_complex_values_are_made_up_too():
    given = [torch.randn(4, 3, dtype=torch.complex64)]
    gm = traced(lambda z: z * 2, *given)
    made = [v.choices[0][0] for v in variants(gm, given, False, torch.Generator().manual_seed(0))]
    assert all(v.dtype is torch.complex64 and not torch.equal(v, given[0]) for v in made)


def test_values_far_away_have_one_sign_in_a_row():
    given = [torch.randn(8, 3), torch.rand(8, 3)]
    gm = traced(lambda x, y: x + y, *given)
    made = {v.label: v for v in variants(gm, given, False, torch.Generator().manual_seed(0))}
    far, positive = made["values a million times as large, of one sign in a row"].choices[0]
    assert ((far > 0).all(-1) | (far < 0).all(-1)).all()
    assert (far < 0).any()
    assert (far > 0).any()
    assert (positive >= 0).all()
    assert torch.equal(far.abs(), given[0].abs() * 2.0**20)


def made_of(gm, given):
    """The made-up inputs, by what they are."""
    found = {}
    for variant in variants(gm, given, False, torch.Generator().manual_seed(0)):
        found.setdefault(variant.label, []).append(variant)
    return found


def positions(mask, table):
    return torch.nn.functional.embedding(mask.long().cumsum(-1) - 1, table)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_flags_that_end_in_an_index_are_varied(dtype):
    given = [torch.ones(4, 5, dtype=dtype), torch.randn(5, 2)]
    choices = made_of(traced(positions, *given), given)["rows of flags that hold nowhere or everywhere"][
        0
    ].choices
    (_, with_one, last) = choices
    assert 1 in with_one[0].long().sum(-1) or with_one[0].long().unique().numel() == 2
    assert (with_one[0].long().sum(-1) >= 1).all()  # an index of -1 does not exist
    positions(with_one[0], given[1])
    assert torch.equal(last[0], given[0])  # no other flags: as they were


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_some_row_has_no_flag_and_some_row_has_all(rows):
    given = [torch.rand(rows, 8) < 0.5, torch.randn(rows, 8)]
    gm = traced(lambda flags, x: torch.where(flags, x, 0), *given)
    masks = [v.choices[-1][0] for v in made_of(gm, given)["rows of flags that hold nowhere or everywhere"]]
    counts = torch.cat([mask.sum(-1) for mask in masks])
    assert {0, 8} <= set(counts.tolist())


def test_rows_of_equal_values():
    given = [torch.randn(3, 4), torch.randn(4)]
    (variant,) = made_of(traced(lambda x, w: x * w, *given), given)["rows of equal values"]
    ((x, w),) = variant.choices
    assert all(row.unique().numel() == 1 for row in (*x, w))
    assert x.unique().numel() == 3


def test_float16_goes_to_its_edge():
    given = [torch.randn(3, 4).half()]
    gm = traced(lambda x: x * x, *given)
    (variant,) = made_of(gm, given)["values nearly as large as float16 stands"]
    sizes = [x.abs().max().item() for (x,) in variant.choices]
    assert sizes == sorted(sizes, reverse=True)
    assert variant.spare
    assert "values nearly as large as float16 stands" not in made_of(
        traced(torch.sin, torch.ones(2)), [torch.ones(2)]
    )
