"""Tuning models of other types than float32."""

import time

import pytest
import torch

import fxpasses


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64])
def test_a_right_rewrite_is_within_rounding(tmp_path, dtype):
    torch.manual_seed(0)
    down, up = torch.randn(256, 4, dtype=dtype) / 8, torch.randn(4, 256, dtype=dtype) / 8
    down.requires_grad_()
    x = torch.randn(64, 256, dtype=dtype)
    how = {"options": {"compiler": "eager"}, "cache": tmp_path, "clock": time.process_time, "show": False}
    tuned = fxpasses.tune(lambda x: x @ (down @ up), x, passes=["reassociate_matmuls"], seconds=60, **how)
    assert "wrong" not in {entry.outcome for entry in tuned.ledger}
    assert tuned.steps[:1] == ("reassociate_matmuls",)
    torch.testing.assert_close(tuned(x), x @ (down @ up))
