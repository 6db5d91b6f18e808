"""Layers under checkpointing, autocast, no_grad and the like, with randomness and shared memory: as in eager."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxpasses
from tests.fxpasses.regional.support import Block, Stack, check, copies, reasons, taken

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def same_weights_each_time():
    torch.manual_seed(0)


def test_checkpointed_layers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.layers = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = torch.tanh(checkpoint(layer, x, use_reentrant=False)) + 1
            return x

    assert check(Net(), [X])[0] >= 3


def test_autocast_inside_of_layers():
    class Mixed(Block):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                y = self.down(F.gelu(self.up(self.norm(x))))
            return x + y.float()

    assert check(Stack([Mixed() for _ in range(4)]), [X], tolerance=3e-2) == [4]


def test_autocast_around_layers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(6))

        def forward(self, x):
            x = x * 2
            for layer in self.layers[:3]:
                x = layer(x)
            with torch.autocast("cpu", torch.bfloat16):
                for layer in self.layers[3:]:
                    x = layer(x)
            return x.float()

    found = check(Net(), [torch.randn(4, 8, requires_grad=True)], tolerance=3e-2)
    assert found[:2] == [3, 3]


def test_autocast_around_the_call():
    model = Stack([Block() for _ in range(4)])
    with torch.autocast("cpu", torch.bfloat16):
        assert check(model, [X], tolerance=3e-2) == [4]


def test_no_grad_around_some_layers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(6))

        def forward(self, x):
            x = x * 2
            with torch.no_grad():
                for layer in self.layers[:3]:
                    x = layer(x)
            for layer in self.layers[3:]:
                x = layer(x)
            return x

    model = Net()
    found = check(model, [torch.randn(4, 8, requires_grad=True)])
    assert found[:2] in ([2, 2], [3, 3])  # the first of three has an input of another kind


def test_gradients_turned_on_in_the_midst_of_a_repeat():
    """The copies also repeat with a boundary inside of ``no_grad``: a call that stood there would have no gradient."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8) / 3)
            self.register_buffer("u", torch.ones(8))

        def forward(self, x):
            y = torch.tanh(x)
            with torch.no_grad():
                v = torch.mv(self.weight.t(), self.u) / 3
                self.u.copy_(torch.mv(self.weight, v) / 3)
            return F.linear(y, self.weight / (self.u @ self.weight @ v + 5)) * 2

    x = torch.randn(4, 8, requires_grad=True)
    assert check(nn.Sequential(*(Normed() for _ in range(5))), [x]) == [5]


def test_frozen_layers_and_trained_ones():
    layers = [Block() for _ in range(6)]
    for layer in layers[:3]:
        layer.requires_grad_(False)
    found = check(Stack(layers), [X])
    assert sum(item.copies == 3 for item in taken()) >= 2 or 6 in found


def test_inference():
    model = Stack([Block() for _ in range(4)]).eval()
    with torch.no_grad():
        assert check(model, [X]) == [4]
    with torch.inference_mode():
        assert check(model, [X]) == [4]
    counted = fxpasses.stats()
    assert (counted.joint, counted.inference) == (0, 2)


def test_dropout_is_random_in_each_layer_and_zero_at_the_same_places_backward():
    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Identity(), nn.Dropout(0.5), nn.Identity()) for _ in range(4)
            )

        def forward(self, x):
            return torch.stack([torch.sin(layer(x) * 1.0) for layer in self.layers])

    from tests.fxpasses.regional.support import compiled

    torch._dynamo.reset()
    fxpasses.reset_stats()
    model = Drops()
    x = torch.ones(1000, requires_grad=True)
    y = compiled(model)(x)
    y.sum().backward()
    dropped = y == 0
    assert copies() == [4]
    assert not torch.equal(dropped[0], dropped[1])
    assert 0.4 < dropped.float().mean() < 0.6
    torch.testing.assert_close(x.grad, ((~dropped) * 2 * torch.cos(torch.tensor(2.0))).sum(0))


def test_views_of_inputs_and_of_each_other():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.both = nn.Linear(8, 16)

        def forward(self, x):
            y = torch.tanh(self.both(x))
            a, b = y.chunk(2, -1)
            return x.view(2, -1), a, b, y.t(), torch.sin(a) * b

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.layers = nn.ModuleList(Views() for _ in range(3))

        def forward(self, x):
            x = self.first(x)
            outputs = []
            for layer in self.layers:
                v, a, b, t, x = layer(x)
                outputs += [v, a, b, t]
            return (x, *outputs)

    assert check(Net(), [X])[0] == 3


def test_hidden_states_that_are_returned_may_be_changed():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.layers = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x):
            x = self.first(x)
            hidden = []
            for layer in self.layers:
                x = layer(x)
                hidden.append(x * 1)
            hidden[1].mul_(2)
            return tuple(hidden)

    assert check(Net(), [X])[0] == 4


def test_data_dependent_sizes_stay_outside():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x):
            x = x[x[:, 0].abs() > 0.1]
            for layer in self.layers:
                x = layer(x)
            return x

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(Net(), [torch.randn(6, 8, requires_grad=True)])
    assert not taken()
    assert reasons() == ""


def test_function_transforms_stay_outside_and_layers_around_them_do_not():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.ModuleList(Block() for _ in range(3))
            self.layers = nn.ModuleList(Block() for _ in range(4))

        def transformed(self, row):
            for layer in self.inner:
                row = layer(row)
            return row

        def forward(self, x):
            x = torch.vmap(self.transformed)(x)
            direction = torch.func.grad(lambda z: (z.sin() ** 2).sum())(x)
            for layer in self.layers:
                x = layer(x) + direction
            return x

    assert check(Net(), [torch.randn(4, 8, requires_grad=True)], tolerance=1e-4) == [4]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("odd", ["nothing", "in_dims", "function", "nested"])
def test_layers_that_map_a_function(odd, dynamic):
    class Mapped(nn.Module):
        def __init__(self, odd):
            super().__init__()
            self.linear, self.odd = nn.Linear(8, 8), odd

        def row(self, row):
            scaled = row.softmax(-1) * (3 if self.odd == "function" else 2)
            return torch.vmap(torch.sin)(scaled) if self.odd == "nested" else scaled

        def forward(self, x):
            over = 1 if self.odd == "in_dims" else 0
            return x + self.linear(torch.vmap(self.row, in_dims=over, out_dims=over)(x)).tanh()

    layers = [Mapped(odd if i == 2 else "nothing") for i in range(5)]
    more = [[torch.randn(7, 8)]] if dynamic else ()
    found = check(Stack(layers), [torch.randn(4, 8)], more=more, dynamic=dynamic, tolerance=1e-4)
    assert found[0] == (5 if odd == "nothing" else 4)


def test_autograd_functions_inside_of_layers():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return 3 * x * gradient  # on purpose not the derivative

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return x + torch.tanh(Square.apply(self.linear(x)))

    check(Stack([Layer() for _ in range(4)]), [X])


def test_constants_in_the_code_of_a_layer():
    class Layer(nn.Module):
        def __init__(self, shift):
            super().__init__()
            self.linear, self.shift = nn.Linear(8, 8), shift

        def forward(self, x):
            return x + torch.tanh(self.linear(x) + torch.tensor(self.shift)) * 2

    found = check(Stack([Layer([0.1] * 8), Layer([0.1] * 8), Layer([0.7] * 8), Layer([0.7] * 8)]), [X])
    assert found


def test_checkpointed_attention_keeps_a_random_state():
    """AOTAutograd saves the generator's state around attention, a tensor whose size no input gives."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.linear(x).view(2, 2, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
            return x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 2, 8)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(checkpoint(layer, x, use_reentrant=False)) + 1
            return x

    check(Model(), [torch.randn(2, 2, 8, requires_grad=True)])


def test_lazy_conjugates_inside_of_regions():
    """AOTAutograd makes the first call of custom operators under a dispatch mode, below which nothing resolves them."""

    class Rotated(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.turn = nn.Linear(8, 8), nn.Parameter(torch.randn(8, dtype=torch.complex64))

        def forward(self, x):
            turned = x * self.turn.conj()
            return self.linear(x).sin() + turned.imag

    assert check(nn.Sequential(*(Rotated() for _ in range(4))), [X.clone().requires_grad_()]) == [4]
