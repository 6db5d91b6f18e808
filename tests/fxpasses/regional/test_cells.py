"""Layers that look different from layer to layer, and are the same: cells, places in memory, strides."""

import pytest
import torch
from torch import nn

from tests.fxpasses.regional.support import Stack, check

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def same_weights_each_time():
    torch.manual_seed(0)


class Cells(nn.Module):
    """A recurrent cell over the steps of a sequence, each a slice that begins elsewhere in memory."""

    def __init__(self, cell, steps):
        super().__init__()
        self.cell, self.steps = cell, steps

    def forward(self, x):
        state, found = x[:, 0].sin(), []
        for step in range(self.steps):
            state = self.cell(x[:, step], state)
            state = state[0] if isinstance(state, tuple) else state
            found.append(state)
        return torch.stack(found, 1)


class LastOfTwo(nn.LSTMCell):
    def forward(self, x, state):
        return super().forward(x, (state, state))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("cell", [nn.GRUCell, nn.RNNCell, LastOfTwo])
def test_recurrent_cells(cell, dynamic):
    x = torch.randn(3, 6, 8, requires_grad=True)
    more = [[torch.randn(4, 6, 8, requires_grad=True)]] if dynamic else ()
    assert check(Cells(cell(8, 8), 6), [x], more=more, dynamic=dynamic) == [6]


@pytest.mark.parametrize("skipped", [0, 1])
def test_places_in_memory(skipped):
    class Strided(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return x.as_strided((3, 8), (16, 1), skipped).sin() + self.linear(x).cos()

    class Slices(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Strided() for _ in range(4))

        def forward(self, x):
            parts = [(x * 2)[:, :8], (x * 3)[:, 8:], (x * 4)[:, 8:], (x * 5)[:, 8:]]
            return torch.cat([layer(part) for layer, part in zip(self.layers, parts, strict=True)])

    check(Slices(), [torch.randn(3, 16)])


def test_a_call_with_several_results_before_a_repeat():
    class Halves(nn.Module):
        def __init__(self, several):
            super().__init__()
            self.linear, self.several = nn.Linear(8, 8), several

        def forward(self, x):
            values = x.topk(8, sorted=True) if self.several == 1 else x.sort(-1, descending=self.several == 2)
            return x + self.linear(values[0].sin()).tanh()

    assert check(Stack([Halves(i) for i in (0, 1, 2, 2, 0, 1)]), [torch.randn(3, 8)])


class Convolves(nn.Module):
    """A layer of a convolutional network with its channels last for a while."""

    def __init__(self):
        super().__init__()
        self.depthwise, self.norm, self.linear = (
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.LayerNorm(8),
            nn.Linear(8, 8),
        )

    def forward(self, x):
        y = self.linear(self.norm(self.depthwise(x).permute(0, 2, 3, 1))).tanh()
        return x + y.permute(0, 3, 1, 2)


class ChannelsLast(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@pytest.mark.slow
def test_strides_that_are_written_in_two_ways():
    """torch writes those of the first layer's input in another way, for the sake of images without pixels."""
    model = nn.Sequential(nn.Conv2d(3, 8, 4, 4), ChannelsLast(8), *(Convolves() for _ in range(4)))
    more = [[torch.randn(3, 3, 24, 24)]]
    assert check(model, [torch.randn(2, 3, 16, 16)], more=more, dynamic=True, tolerance=1e-4) == [4]
