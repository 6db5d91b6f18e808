"""Verdicts on graphs with complex numbers."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fxpasses.exact import equivalent


def graphs(before, after, *inputs):
    return make_fx(before)(*inputs), make_fx(after)(*inputs), inputs


def test_complex_numbers_have_the_type_of_their_graph_where_a_call_has_no_rule():
    before, after, inputs = graphs(
        lambda x: x.sgn(),
        lambda x: torch.view_as_complex(torch.view_as_real(x.sgn())),
        torch.randn(3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)),
    )
    assert equivalent(before, after, inputs).kind == "EQUAL"


@pytest.mark.parametrize("shown", [lambda z: z, torch.view_as_real, torch.abs])
def test_complex_numbers_are_compared_as_floats_and_named(shown):
    def before(x):
        return shown(torch.fft.fft(x) * 3)

    def verdict(after):
        one, other, inputs = graphs(
            before, after, torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
        )
        return equivalent(one, other, inputs)

    moved = verdict(lambda x: shown(torch.fft.fft(x * 3)))
    assert moved.kind in ("EQUAL", "UNPROVED")  # never another function for what kernels round
    assert "aten._fft_r2c.default" in moved.opaque
    assert verdict(before).kind == "EQUAL"
    assert verdict(lambda x: shown(torch.fft.fft(x * 3.1))).kind == "DIFFERENT"


def test_complex_inputs_are_sampled():
    z = torch.randn(3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    one, other, inputs = graphs(lambda z: z * 2, lambda z: z + z, z)
    assert equivalent(one, other, inputs).kind == "EQUAL"
    one, other, inputs = graphs(lambda z: z * 2, lambda z: z * 2.2, z)
    assert equivalent(one, other, inputs).kind == "DIFFERENT"
