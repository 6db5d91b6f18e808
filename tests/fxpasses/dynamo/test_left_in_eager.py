"""A function that Dynamo leaves in eager is said, once, with the reason."""

import logging

import torch

import fxpasses


def test_a_loop_that_cannot_be_traced_is_said_once(caplog):
    @torch._dynamo.disable
    def opaque(x):
        return x + 1

    def function(x):
        for _ in range(2):
            x = opaque(x.sin())
        return x

    fxpasses.reset_stats()
    with caplog.at_level(logging.WARNING, logger="fxpasses"):
        run = torch.compile(function, backend="fxpasses", options={"compiler": "eager"})
        for size in (2, 3, 4):
            x = torch.randn(size)
            assert torch.equal(run(x), function(x))
    (found,) = fxpasses.stats().fallbacks
    assert found.stage == "dynamo"
    assert found.location.endswith(", function")
    assert "loop" in found.reason
    assert "x = opaque(x.sin())" in found.reason
    assert len([record for record in caplog.records if "runs in eager" in record.message]) == 1
