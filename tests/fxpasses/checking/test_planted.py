"""A sample of the planted faults of ``python -m benchmarks planted``, one or two of each family."""

from __future__ import annotations

import pytest

from benchmarks.planted import FAMILIES, judge

SAMPLE = [
    ("gradients", "a lost detach"),
    ("gradients", "gradients taken for ones"),
    ("sizes", "wrong beyond 64"),
    ("sizes", "square products"),
    ("memory", "empty for zeros"),
    ("memory", "a write dropped"),
    ("numbers", "integers rounded otherwise"),
    ("numbers", "x - x = 0"),
    ("precision", "positions in bfloat16"),
    ("precision", "sums in bfloat16"),
    ("stages", "one result fewer"),
    ("strangers", "complex gradient"),
    ("strangers", "negative indices"),
    ("strangers", "hidden by a small number"),
]


@pytest.mark.parametrize(("family", "name"), SAMPLE)
def test_it_is_found_blamed_and_cut_down(family, name):
    verdict = judge(FAMILIES[family][name])
    assert verdict.found, verdict.text
    assert verdict.blamed, verdict.text
    assert 1 <= verdict.calls <= 3, verdict.text


def test_every_family_says_what_it_plants():
    plants = [plant for family in FAMILIES.values() for plant in family.values()]
    assert len(plants) >= 60
    for plant in plants:
        for item in plant.passes:
            assert item.function.__doc__ or item.name.startswith("scales_")
