"""Calls at the edges of dtypes and sizes: what eager takes the mode takes, with eager's layout; what it refuses is refused."""

import pytest
import torch
import torch.nn.functional as F

import fake

NUMBERS = [
    True,
    2,
    -1,
    128,
    300,
    65504,
    65505,
    1e5,
    2**31,
    2**40,
    2**63 - 1,
    -(2**63),
    3.4e38,
    1e39,
    1e308,
    1j,
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.uint8, torch.int64, torch.complex64]


def zeros(dtype, *sizes):
    return torch.zeros(sizes or (3,), dtype=dtype)


WITH_A_NUMBER = {
    "where": lambda d, n: torch.where(zeros(torch.bool), zeros(d), n),
    "where, first": lambda d, n: torch.where(zeros(torch.bool), n, zeros(d)),
    "scalar_tensor": lambda d, n: torch.scalar_tensor(n, dtype=d),
    "full": lambda d, n: torch.full((2,), n, dtype=d),
    "fill_": lambda d, n: zeros(d).fill_(n),
    "lerp": lambda d, n: torch.lerp(zeros(d), zeros(d), n),
    "lerp_": lambda d, n: zeros(d).lerp_(zeros(d), n),
    "addcmul": lambda d, n: torch.addcmul(zeros(d), zeros(d), zeros(d), value=n),
    "add": lambda d, n: torch.add(zeros(d), zeros(d), alpha=n),
    "sub": lambda d, n: torch.sub(zeros(d), zeros(d), alpha=n),
    "addmm": lambda d, n: torch.addmm(zeros(d, 2, 2), zeros(d, 2, 2), zeros(d, 2, 2), beta=n),
    "baddbmm": lambda d, n: torch.baddbmm(zeros(d, 1, 2, 2), zeros(d, 1, 2, 2), zeros(d, 1, 2, 2), alpha=n),
}


def outcome(call):
    try:
        made = call()
    except (RuntimeError, NotImplementedError, TypeError):
        return "refused"
    made = made if isinstance(made, tuple) else (made,)
    return [(t.shape, t.stride(), t.dtype) for t in made]


@pytest.mark.parametrize("name", WITH_A_NUMBER)
def test_numbers_at_the_edge_of_a_dtype(name):
    call, seen = WITH_A_NUMBER[name], set()
    for dtype in [d for d in DTYPES if "lerp" not in name or d.is_floating_point or d.is_complex]:
        for number in NUMBERS:
            expected = outcome(lambda: call(dtype, number))  # noqa: B023 - called at once
            with fake.FakeTensorMode():
                assert outcome(lambda: call(dtype, number)) == expected, (dtype, number)  # noqa: B023
            seen.add(expected == "refused")
    assert seen == {True, False}


ACCEPTED = {
    "a truth value to the power of one": lambda: zeros(torch.bool) ** True,
    "in place": lambda: zeros(torch.bool).pow_(False),
    "in other strides": lambda: zeros(torch.bool, 2, 3).t() ** True,
    "a truth value shifted": lambda: zeros(torch.bool) << 2,
    "to the right": lambda: zeros(torch.bool, 2, 3).t() >> 1,
    "no labels": lambda: F.cross_entropy(zeros(torch.float32, 0, 3), zeros(torch.int64, 0)),
    "no labels, summed": lambda: F.nll_loss(zeros(torch.half, 0, 3), zeros(torch.int64, 0), reduction="sum"),
    "no labels, smoothed": lambda: F.cross_entropy(
        zeros(torch.float32, 0, 3), zeros(torch.int64, 0), label_smoothing=0.1
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_eager_takes(name):
    expected = outcome(ACCEPTED[name])
    assert expected != "refused"
    with fake.FakeTensorMode():
        assert outcome(ACCEPTED[name]) == expected


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("shape", "stride"),
    [
        ((1, 3, 2, 2), (1, 1, 6, 3)),
        ((1, 3, 2, 2), (12, 4, 2, 1)),
        ((2, 3, 2, 2), (12, 1, 6, 3)),
        ((2, 1, 3, 3), (9, 1, 3, 1)),
        ((2, 3, 2, 2), (1, 2, 12, 6)),
        ((2, 4, 1, 1), (4, 1, 4, 4)),
        ((1, 2, 2, 3, 2), (1, 1, 12, 4, 2)),
        ((2, 3, 4), (1, 2, 6)),
    ],
)
def test_batch_norm_where_sizes_leave_strides_open(shape, stride, training):
    channels = shape[1]

    def call(wide=1):
        x = torch.empty_strided(shape, stride)
        mean, variance = zeros(torch.float32, channels * wide)[::wide], torch.ones(channels)
        return F.batch_norm(x, mean, variance, None, None, training)

    for wide in (1, 2):
        expected = outcome(lambda: call(wide))  # noqa: B023 - called at once
        assert expected != "refused"
        with fake.FakeTensorMode():
            assert outcome(lambda: call(wide)) == expected  # noqa: B023
