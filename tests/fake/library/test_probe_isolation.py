"""probe survives kernels that crash or hang, and asks for the calls that would decide what is open."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch

from fake.library import probe
from fake.library.errors import ProbeError
from fake.library.probe.forked_calls import Crash, can_isolate, run_isolated
from fake.library.probe.rule import UndecidedError

r = torch.randn


def crashes_on_three_dimensions(x: torch.Tensor) -> torch.Tensor:
    if x.dim() == 3:
        os.abort()
    return x.new_zeros(x.shape[0] * 3)


def test_a_crash_costs_one_call() -> None:
    rule = probe(crashes_on_three_dimensions, [(r(2, 3),)])
    assert rule(r(5, 6)).shape == (15,)
    assert len(rule.crashes) == 1
    assert "SIGABRT: x=float32[3, 2, 3]" in rule.crashes[0]
    with pytest.raises(UndecidedError):
        rule(r(2, 3, 4))


def test_a_sample_that_crashes_is_an_error() -> None:
    with pytest.raises(ProbeError, match=r"the kernel was killed by SIGABRT: x=float32\[1, 2, 3\]"):
        probe(crashes_on_three_dimensions, [(r(1, 2, 3),)])


def test_the_result_does_not_depend_on_isolation() -> None:
    samples = [(r(2, 3), r(3, 4)), (r(5, 2, 3), r(3, 4))]
    assert (
        probe(torch.matmul, samples, isolate=True).source
        == probe(torch.matmul, samples, isolate=False).source
    )


def test_a_step_that_hangs_is_given_up() -> None:
    def steps(first: int) -> Iterator[int]:
        for number in range(first, 3):
            if number == 1:
                time.sleep(60)
            yield number

    assert list(run_isolated(steps, timeout=1.0)) == [0, Crash(1, "gave no answer within 1 s"), 2]


def test_errors_of_the_work_itself_come_through() -> None:
    def steps(first: int) -> Iterator[int]:
        yield first
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        list(run_isolated(steps))


def test_a_process_can_be_forked_here() -> None:
    assert can_isolate()


def test_arguments_that_a_sample_leaves_out_are_no_open_question() -> None:
    def op(x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if x.shape != y.shape or x.dim() != 1:
            raise ValueError
        return x * y * scale

    for sample in ((r(3), r(3)), (r(3), r(3), 2.0)):  # what a sample leaves out is tried with its default
        rule = probe(op, [sample])
        assert rule.decided
        assert not rule.open_questions


def test_an_answered_question_is_not_asked_again() -> None:
    def op(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(x.shape[0] * 3) if x.dim() == 2 else x.new_zeros(x.numel() + 1)

    def asked(*samples: tuple[torch.Tensor, ...]) -> str:
        return " ".join(probe(op, samples).open_questions)

    assert "x=float32[3]" in asked((r(2, 3),))
    assert "x=float32[3]" not in asked((r(2, 3),), (r(3),), (r(4),))
