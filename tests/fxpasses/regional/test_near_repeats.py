"""Layers that are almost the same must not share a region; layers that are the same must."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.fxpasses.regional.support import Block, Stack, check, copies, reasons, taken

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def same_weights_each_time():
    torch.manual_seed(0)


def blocks(count: int = 5, **settings) -> list[Block]:
    return [Block(**settings) for _ in range(count)]


@pytest.mark.slow
def test_equal_layers_share_one_region():
    assert check(Stack(blocks()), [X]) == [5]
    assert taken()[0].name == "layers.*"


def with_other_eps(layers):
    layers[2].norm.eps = 1e-3


def with_other_constant(layers):
    layers[2].scale = 0.5


def with_one_more_operation(layers):
    layers[2] = nn.Sequential(layers[2], nn.Tanh())


def with_frozen_weight(layers):
    layers[2].up.weight.requires_grad_(False)


def with_other_activation(layers):
    class Other(Block):
        def forward(self, x):
            return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))

    layers[2] = Other()


def with_other_width(layers):
    layers[2].up, layers[2].down = nn.Linear(8, 24), nn.Linear(24, 8)


def without_bias(layers):
    layers[2].up = nn.Linear(8, 16, bias=False)


def with_forward_hook(layers):
    layers[2].down.register_forward_hook(lambda module, args, output: output * 3)


def with_in_place_update(layers):
    class Other(Block):
        def forward(self, x):
            y = self.down(F.gelu(self.up(self.norm(x))))
            y *= self.scale
            return x + y

    layers[2] = Other()


def with_swapped_operands(layers):
    class Other(Block):
        def forward(self, x):
            return self.down(F.gelu(self.up(self.norm(x)))) * self.scale + x

    layers[2] = Other()


def in_other_mode(layers):
    for layer in layers:
        layer.drop.p = 0.5
        layer.eval()
    layers[2].train()
    layers[2].drop.p = 1.0  # drops everything: no random numbers to compare


@pytest.mark.parametrize(
    "plant",
    [
        with_other_eps, with_other_constant, with_frozen_weight, with_other_activation,
        with_other_width, without_bias, with_forward_hook, with_in_place_update, with_swapped_operands, in_other_mode,
    ],
)  # fmt: skip
def test_one_layer_is_different(plant):
    layers = blocks()
    plant(layers)
    check(Stack(layers), [X])
    # What the odd layer has in common with the others may be a region of all five; the whole layer may not.
    whole = 7
    assert all(item.calls < whole for item in taken() if item.copies == 5)
    assert max(copies()) >= 4


def test_what_is_around_a_layer_does_not_matter():
    layers: list[nn.Module] = [*blocks()]
    with_one_more_operation(layers)
    assert check(Stack(layers), [X])[0] == 5


def test_another_dtype():
    class Half(Block):
        def forward(self, x):
            return super().forward(x.double()).float()

    layers = blocks()
    layers[2] = Half().double()
    assert max(check(Stack(layers), [X])) <= 4


def test_an_operand_used_twice_is_not_two_operands():
    class Pair(nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.b = self.a if tied else nn.Linear(8, 8)

        def forward(self, x):
            return x + torch.tanh(self.b(torch.relu(self.a(x))))

    check(Stack([Pair(False), Pair(False), Pair(True), Pair(True)]), [X])
    assert taken()
    assert all(item.copies == 2 for item in taken() if item.calls == 5)  # what has both products in it


def test_a_weight_tied_across_layers_is_an_input_like_any_other():
    layers = blocks()
    for layer in layers[1:]:
        layer.up.weight = layers[0].up.weight
    assert check(Stack(layers), [X]) == [5]


def test_the_same_layer_called_twice_gathers_both_gradients():
    block = Block()
    assert check(Stack([block, block, block, Block()]), [X]) == [4]


def test_dropout_probabilities_are_constants():
    layers = [Block(p=p) for p in (1.0, 1.0, 0.0, 0.0, 1.0)]
    assert 5 not in check(Stack(layers), [X])


def test_train_and_eval_batch_norm():
    class Conv(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

        def forward(self, x):
            return x + F.relu(self.norm(self.conv(x)))

    layers = [Conv() for _ in range(4)]
    layers[3].eval()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*layers)

        def forward(self, x):
            return self.layers(x)

    # The gradient of a bias in front of a batch norm is zero: in float32 only rounding would be compared.
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64, requires_grad=True)
    assert check(Net().double(), [x]) == [3]


def test_shapes_decide():
    class Pool(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(blocks(6))

        def forward(self, x):
            for layer in self.layers[:3]:
                x = layer(x)
            x = x[:2]
            for layer in self.layers[3:]:
                x = layer(x)
            return x

    assert check(Pool(), [torch.randn(4, 8, requires_grad=True)]) == [3, 3]


def test_auto_leaves_what_is_too_small_and_says_why():
    assert check(Stack(blocks(2)), [X], regions="auto") == []
    assert "worth it from" in reasons()
    assert copies() == []


def test_off_compiles_nothing_apart():
    assert check(Stack(blocks()), [X], regions="off") == []


@pytest.mark.slow
def test_patterns_choose_modules():
    model = Stack(blocks())
    assert check(copy.deepcopy(model), [X], regions=["layers.*"]) == [5]
    assert check(copy.deepcopy(model), [X], regions=["layers.[123]"]) == [3]
    assert check(copy.deepcopy(model), [X], regions=["layers.0"]) == [1]
    assert check(model, [X], regions=["nothing"]) == []
