"""One layer of six differs in a way that is easy to overlook: it gets no region with the others, and all is as in eager."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.fxpasses.regional.support import Stack, check, taken

COPIES, ODD = 6, 2


class Layer(nn.Module):
    """A layer that computes what it is given, odd or not."""

    def __init__(self, compute, odd):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)
        self.compute, self.odd = compute, odd

    def forward(self, x):
        return x + self.compute(self, self.norm(x).sin(), self.odd).tanh()


def no_grad_around(layer, x, odd):
    with torch.set_grad_enabled(not odd):
        return layer.linear(x)


def other_autocast_type(layer, x, odd):
    with torch.autocast("cpu", torch.float16 if odd else torch.bfloat16):
        return layer.linear(x)


def autocast_around(layer, x, odd):
    with torch.autocast("cpu", torch.bfloat16, enabled=odd):
        return layer.linear(x).float()


def function_with(tripled):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 3 if tripled else gradient.sin()

    return Scaled


FUNCTIONS = {True: function_with(True), False: function_with(False)}


def function_of_the_same_name(layer, x, odd):
    return FUNCTIONS[odd].apply(layer.linear(x)) * 1.5


def checkpointed(layer, x, odd):
    return checkpoint(layer.linear, x, use_reentrant=False) if odd else layer.linear(x)


def returns_what_it_takes(layer, x, odd):
    y = layer.linear(x)
    return x if odd else y


COMPUTATIONS = {
    "a slice begins elsewhere": lambda layer, x, odd: F.pad(layer.linear(x)[:, 1 if odd else 0 :][:, :4], (0, 4)),
    "a mask's value": lambda layer, x, odd: layer.linear(x).masked_fill(x > 0, -1e4 if odd else -1e3),
    "a limit": lambda layer, x, odd: layer.linear(x).clamp(min=-0.2 if odd else -0.1),
    "the sign of a shift": lambda layer, x, odd: layer.linear(x).roll(-1 if odd else 1, -1),
    "an index": lambda layer, x, odd: layer.linear(x)[:, [0, 1, 2, 3, 4, 5, 7, 6] if odd else [1, 0, 2, 3, 4, 5, 6, 7]],
    "a dimension": lambda layer, x, odd: layer.linear(x).cumsum(0 if odd else 1),
    "an integer for a float": lambda layer, x, odd: layer.linear(x).abs() ** (2 if odd else 2.5),
    "values of a constant": lambda layer, x, odd: layer.linear(x) * torch.tensor([1.0, 2.0] * 3 + [3.0, 4.0 + odd]),
    "a cast": lambda layer, x, odd: layer.linear(x).to(torch.bfloat16 if odd else torch.float32).float().cos(),
    "a detached value": lambda layer, x, odd: layer.linear(x.detach() if odd else x),
    "an update in place": lambda layer, x, odd: layer.linear(x).mul_(2) if odd else layer.linear(x) * 2,
    "an operand twice": lambda layer, x, odd: layer.linear(x) * (x if odd else x.cos()),
    "no_grad": no_grad_around,
    "autocast": autocast_around,
    "autocast to another type": other_autocast_type,
    "a gradient formula": function_of_the_same_name,
    "a checkpoint": checkpointed,
    "an input returned": returns_what_it_takes,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("difference", COMPUTATIONS)
def test_what_a_layer_computes_differs(difference, dynamic):
    torch.manual_seed(0)
    layers = [Layer(COMPUTATIONS[difference], i == ODD) for i in range(COPIES)]
    tolerance = 3e-2 if "autocast" in difference or difference == "a cast" else 1e-4
    check(Stack(layers), [torch.randn(8, 8, requires_grad=True)], dynamic=dynamic, tolerance=tolerance)
    _odd_one_is_alone()


def _odd_one_is_alone():
    whole = max(item.calls for item in taken())
    assert max(item.copies for item in taken() if item.calls == whole) <= COPIES - 1
    assert max(item.copies for item in taken()) >= 3  # those before or after it are equal, at least


def as_buffer(layer):
    bias = layer.linear.bias.detach().clone()
    del layer.linear.bias
    layer.linear.register_buffer("bias", bias)


def transposed_in_memory(layer):
    layer.linear.weight = nn.Parameter(layer.linear.weight.detach().t().contiguous().t())


def elsewhere_in_memory(layer):
    layer.linear.weight = nn.Parameter(torch.randn(80)[3:67].view(8, 8))


def not_trained(layer):
    layer.norm.weight.requires_grad_(False)


def with_hook_before(layer):
    layer.linear.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))


def with_gradient_hook(layer):
    layer.linear.register_forward_hook(lambda module, args, y: y.register_hook(lambda g: g * 3) and None)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "plant",
    [
        as_buffer, transposed_in_memory, elsewhere_in_memory, not_trained, with_hook_before,
        with_gradient_hook,
    ],
)  # fmt: skip
def test_what_a_layer_holds_differs(plant, dynamic):
    torch.manual_seed(0)
    layers = [Layer(lambda layer, x, odd: layer.linear(x).cos() * 2, False) for _ in range(COPIES)]
    plant(layers[ODD])
    check(Stack(layers), [torch.randn(4, 8)], dynamic=dynamic, tolerance=1e-4)
    # What the odd layer has in common with the others may be a region of all six; the whole layer may not.
    whole = 7
    assert all(item.calls < whole for item in taken() if item.copies == COPIES)
    assert max(item.copies for item in taken()) >= 3


def test_weights_shared_by_two_layers_of_six_gather_both_gradients():
    torch.manual_seed(0)
    layers = [Layer(lambda layer, x, odd: layer.linear(x), False) for _ in range(COPIES)]
    layers[3].linear = layers[1].linear
    layers[4].norm.weight = layers[0].norm.weight
    assert check(Stack(layers), [torch.randn(4, 8, requires_grad=True)]) == [COPIES]


def test_parameters_that_are_parts_of_one_tensor():
    torch.manual_seed(0)
    layers = [Layer(lambda layer, x, odd: layer.linear(x), False) for _ in range(COPIES)]
    flat = torch.randn(COPIES, 8, 8) / 3
    for layer, weight in zip(layers, flat, strict=True):
        layer.linear.weight = nn.Parameter(weight)
    assert check(Stack(layers), [torch.randn(4, 8)])[0] >= COPIES - 1


def test_results_changed_after_the_layer_that_its_gradient_needs():
    """What a layer returns may be a saved value by another name; eager saved neither."""

    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            gate = torch.sigmoid(self.linear(x))
            return gate + 0, gate.clone(), x * gate

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Gate() for _ in range(5))

        def forward(self, x):
            kept = []
            for layer in self.layers:
                a, b, x = layer(x)
                b.add_(5)
                kept += [a, b]
            for a in kept[::2]:
                a.zero_()
            return (x, *kept)

    torch.manual_seed(0)
    assert check(Net(), [torch.randn(4, 8, requires_grad=True)]) == [5]
