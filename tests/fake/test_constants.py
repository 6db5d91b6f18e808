"""Short schedules whose numbers models read while they are built."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fake
from fake.dispatch.constants import MAX_SCHEDULE_LENGTH


def test_numbers_of_a_schedule():
    expected = torch.linspace(0, 0.1, 5)
    numbers, total = expected.tolist(), expected.sum().item()
    with fake.FakeTensorMode():
        for _ in range(2):
            rates = torch.linspace(0, 0.1, 5)
            assert type(rates) is fake.FakeTensor
            assert [rate.item() for rate in rates] == rates.tolist() == numbers
            assert rates.sum().item() == total


def test_a_write_of_unknown_values_ends_it():
    with fake.FakeTensorMode():
        rates = torch.linspace(0, 1, 5)
        first = rates[0]
        assert first.item() == 0
        rates.add_(torch.rand(5))
        for unknown in (rates[1], first):
            with pytest.raises(fake.DataDependentOutputException):
                unknown.item()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.linspace(0, 1, MAX_SCHEDULE_LENGTH + 1),
        lambda: torch.linspace(0, 1, 5, device="cuda"),
        lambda: torch.linspace(torch.tensor(0.0), torch.tensor(1.0), MAX_SCHEDULE_LENGTH + 1),
    ],
    ids=["long", "elsewhere", "between tensors"],
)
def test_others_are_unknown(make):
    with fake.FakeTensorMode():
        rates = make()
        with pytest.raises(fake.DataDependentOutputException):
            rates[0].item()


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": torch.float64}, {"dtype": torch.int64}, {"requires_grad": True}, {"device": "meta"}],
)
def test_metadata_is_eagers(options):
    expected = torch.linspace(0, 4, 5, **options)
    with fake.FakeTensorMode():
        made = torch.linspace(0, 4, 5, **options)
    for name in ("shape", "dtype", "device", "requires_grad", "is_leaf"):
        assert getattr(made, name) == getattr(expected, name)
    assert made.stride() == expected.stride()


def test_traces_hold_the_operator():
    with fake.FakeTensorMode():
        graph = make_fx(lambda x: x + torch.linspace(0, 1, 5))(torch.ones(5))
    assert "aten.linspace.default" in graph.code
