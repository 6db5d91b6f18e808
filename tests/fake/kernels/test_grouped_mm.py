"""``_grouped_mm``: sizes, strides and refusals as in eager."""

from __future__ import annotations

import itertools

import pytest
import torch

import fake

grouped_mm = torch.ops.aten._grouped_mm.default

SIZES = {
    "rows": ((6, 4), (3, 4, 8), 3),
    "rows, padded result": ((6, 4), (3, 4, 9), 3),
    "columns": ((3, 6, 4), (4, 12), 3),
    "contraction": ((4, 8), (8, 12), 3),
    "batched": ((3, 6, 4), (3, 4, 8), None),
    "wrong number of groups": ((6, 4), (2, 4, 8), 3),
    "wrong contraction": ((6, 4), (3, 8, 8), 3),
    "offsets missing": ((6, 4), (3, 4, 8), None),
    "offsets too many": ((3, 6, 4), (3, 4, 8), 3),
    "four dimensions": ((1, 3, 6, 4), (3, 4, 8), None),
    "rows not aligned": ((3, 6, 3), (3, 3, 8), None),
}


@pytest.mark.parametrize(
    ("case", "dtype", "column_major"),
    list(itertools.product(SIZES, [torch.float32, torch.bfloat16, torch.float64], [False, True])),
)
def test_as_in_eager(case: str, dtype: torch.dtype, column_major: bool) -> None:
    left_size, right_size, groups = SIZES[case]
    left, right = torch.ones(left_size, dtype=dtype), torch.ones(right_size, dtype=dtype)
    if column_major:
        right = right.mT.contiguous().mT
    offsets = None
    if groups is not None:
        total = {"columns": 12, "contraction": 8}.get(case, 6)
        offsets = torch.tensor([total * (i + 1) // groups for i in range(groups)], dtype=torch.int32)
    mode = fake.FakeTensorMode()
    fakes = [None if t is None else mode.from_tensor(t) for t in (left, right, offsets)]
    try:
        real = grouped_mm(left, right, offsets)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            grouped_mm(*fakes)
    else:
        answer = grouped_mm(*fakes)
        assert (answer.shape, answer.stride(), answer.dtype) == (real.shape, real.stride(), real.dtype)


def test_gradients_of_a_mixture_of_experts() -> None:
    offsets = torch.tensor([2, 4, 6], dtype=torch.int32)

    def gradients(mode: fake.FakeTensorMode | None) -> list[tuple[torch.Size, tuple[int, ...]]]:
        inputs = [torch.ones(6, 4, requires_grad=True), torch.ones(3, 4, 8, requires_grad=True)]
        where = offsets
        if mode is not None:
            inputs = [mode.from_tensor(t) for t in inputs]
            where = mode.from_tensor(offsets)
        found = torch.autograd.grad(torch._grouped_mm(*inputs, offs=where).sum(), inputs)
        return [(g.shape, g.stride()) for g in found]

    try:
        eager = gradients(None)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            gradients(fake.FakeTensorMode())
    else:
        assert gradients(fake.FakeTensorMode()) == eager
