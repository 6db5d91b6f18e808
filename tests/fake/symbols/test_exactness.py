"""Symbolic sizes, strides, offsets and guards against eager, at many sizes (``exactness`` says what is compared)."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

import fake
from tests.fake.symbols.exactness import Refused, check, check_program, trace
from tests.fake.symbols.programs import FAMILIES


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_random_programs(family):
    @settings(
        derandomize=True, max_examples=8, deadline=None, suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate),
    )  # fmt: skip
    @given(FAMILIES[family](), st.integers(0, 1000), st.booleans())
    def run(program, number, duck):
        check_program(program, number, duck_shape=duck)

    run()


PLANES = [[(a, b)] for a, b in itertools.product(range(2, 8), repeat=2)]


@pytest.mark.parametrize(
    ("program", "right_for"),
    [
        (lambda x: x.view(-1, 2), lambda a, b: a * b % 2 == 0),
        (lambda x: x.view(-1), lambda a, b: True),
        (lambda x: x.view(x.shape[1], -1), lambda a, b: True),
        # The tracer asks whether the result is contiguous, and a size of 1 in it gives another answer.
        (lambda x: x.view(2, -1, x.shape[1]), lambda a, b: a % 2 == 0 and a > 2),
        (lambda x: x.flatten().view(x.shape[::-1]), lambda a, b: True),
        (lambda x: x.unsqueeze(1).expand(-1, 3, -1) + x.sum(), lambda a, b: True),
        (lambda x: torch.cat([x, x * 2], 1) @ torch.cat([x, x], 1).mT, lambda a, b: True),
        (lambda x: F.softmax(x, -1) * x.shape[0] + x.mean(0), lambda a, b: True),
        (lambda x: F.layer_norm(x, (x.shape[1],)), lambda a, b: True),
        (lambda x: x.transpose(0, 1).contiguous().view(-1), lambda a, b: True),
        (lambda x: x.new_zeros(x.shape[0] * 2, x.shape[1]) + torch.cat([x, x]), lambda a, b: True),
    ],
)
@pytest.mark.parametrize("duck", [True, False])
def test_a_graph_is_used_wherever_it_is_right(program, right_for, duck):
    """Of sizes from 2 on (0 and 1 are traced on their own), the guards refuse only those where eager differs."""
    accepted = check(program, [(4, 6)], PLANES, duck_shape=duck)
    assert accepted == sum(right_for(a, b) for ((a, b),) in PLANES)


@pytest.mark.parametrize(
    ("program", "right_for"),
    [
        # A slice of size 1 has another answer where the tracer asks for contiguity.
        (lambda x: x[2:].max(0).values, lambda a, b: a > 3),
        (lambda x: x[:, 3:].min(1).values, lambda a, b: b > 4),
        (lambda x: x[2:].amax(), lambda a, b: a > 3),
        (lambda x: x.flatten().as_strided((2, 5), (1, 2)), lambda a, b: a * b >= 10),
        (lambda x: x[2:].gather(0, torch.zeros(1, 1, dtype=torch.int64)), lambda a, b: a > 3),
        (lambda x: F.embedding(torch.zeros(2, dtype=torch.int64), x[2:]), lambda a, b: a > 3),
        (lambda x: torch.slice_scatter(x, x[1:], 0, 1), lambda a, b: a > 2),
        (lambda x: torch.diagonal_scatter(x, x[:, 0]), lambda a, b: a <= b),
    ],
)
def test_what_eager_refuses_the_guards_refuse(program, right_for):
    """And no more than that."""
    accepted = check(program, [(4, 6)], PLANES, duck_shape=False)
    assert accepted == sum(right_for(a, b) for ((a, b),) in PLANES)


def test_a_guard_says_that_eager_refuses_the_rest():
    mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv())
    x = mode.from_tensor(torch.zeros(5, 6), name="x")
    with mode:
        x[2:].max(0)
    (guard,) = [guard for guard in mode.shape_env.guards.explain() if guard.operator == "aten.max.dim"]
    assert guard.expression == "3 <= x.size(0)"
    assert "is an error" in guard.why
    assert "an error in eager, too" in guard.avoid


def test_an_error_of_eager_is_an_error_here():
    for wrong in (
        lambda x: x.view(5, -1),
        lambda x: x.view(-1, -1),
        lambda x: x @ x,
        lambda x: x.view(7),
        lambda x: x + x[1:],
        lambda x: F.pad(x, (3, 3, 3, 3), mode="reflect"),
    ):
        with pytest.raises(Refused):
            trace(wrong, [(4, 6)])


def test_views_ask_only_for_the_number_of_elements():
    mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv(duck_shape=False))
    x = mode.from_tensor(torch.zeros(4, 6, 5), name="x")
    with mode:
        x.view(-1, x.shape[2])
        x.view(x.shape[0], -1)
        x.view(-1).view(x.shape[2], x.shape[1], x.shape[0])
    assert not mode.shape_env.guards
    with mode:
        x.view(x.shape[0], 2, -1, x.shape[2])
    assert [str(g) for g in mode.shape_env.guards.minimal() if g.kind == "relation"] == ["x.size(1) % 2 == 0"]


def test_a_view_of_another_size_has_eagers_message():
    mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv())
    x = mode.from_tensor(torch.zeros(4, 6), name="x")
    with mode, pytest.raises(RuntimeError, match=r"shape '\[5, -1\]' is invalid for input of size 24"):
        x.view(5, -1)
    with mode, pytest.raises(RuntimeError, match=r"shape '\[5, 5\]' is invalid for input of size 24"):
        x.view(5, 5)
    with mode, pytest.raises(RuntimeError, match="only one dimension can be inferred"):
        x.view(-1, -1)
