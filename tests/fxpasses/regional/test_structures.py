"""Models of many shapes, trained with regions: outputs, gradients and buffers as in eager."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxpasses
from tests.fxpasses.regional.support import Block, Stack, check, saved_bytes, taken

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def same_weights_each_time():
    torch.manual_seed(0)


class Attention(nn.Module):
    """Self-attention with a mask that all layers share, returning a tuple."""

    def __init__(self, width=8, heads=2):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x, mask):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        weights = ((q @ k.transpose(-1, -2)) / 2 + mask).softmax(-1)
        y = (weights @ v).transpose(1, 2).reshape(batch, length, width)
        return x + self.out(y), k


class Decoder(nn.Module):
    def __init__(self, layers=4, keep=True):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Attention() for _ in range(layers))
        self.keep = keep

    def forward(self, x):
        length = x.shape[1]
        mask = torch.full((length, length), -1e4).triu(1)
        x = self.first(x)
        kept = []
        for layer in self.layers:
            x, k = layer(x, mask)
            kept.append(k)
        return (x, *kept) if self.keep else x


@pytest.mark.parametrize("keep", [False, True], ids=["hidden only", "keys returned"])
def test_shared_mask_and_tuples(keep):
    assert check(Decoder(keep=keep), [torch.randn(2, 5, 8)])[0] == 4


def test_dynamic_batch_and_sequence():
    sizes = [(2, 5, 8), (3, 7, 8), (6, 4, 8)]
    model = Decoder()
    found = check(model, [torch.randn(sizes[0])], more=[[torch.randn(s)] for s in sizes[1:]], dynamic=True)
    assert found == [4]
    assert fxpasses.stats().graphs == 1


@torch.library.custom_op("fxpasses_structures::padded_sums", mutates_args=())
def padded_sums(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A result, and what its backward pass reads: of a length that is rounded up, as that of attention on a GPU."""
    return x.sin(), x.new_ones(x.shape[0], math.ceil(x.shape[1] / 32) * 32)


@padded_sums.register_fake
def _(x):
    return torch.empty_like(x), x.new_empty(x.shape[0], math.ceil(x.shape[1] / 32) * 32)


padded_sums.register_autograd(
    lambda ctx, g, _: g * ctx.saved_tensors[0].cos() * ctx.saved_tensors[1].mean(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output[1]),
)


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + padded_sums(self.linear(x))[0]


def test_sizes_that_are_rounded_up():
    sizes = [(2, 37, 8), (3, 50, 8), (4, 70, 8)]
    model = nn.Sequential(*(Padded() for _ in range(4)))
    found = check(model, [torch.randn(sizes[0])], more=[[torch.randn(s)] for s in sizes[1:]], dynamic=True)
    assert found == [3]  # the input of the first needs no gradient
    assert fxpasses.stats().graphs == 1


class Resized(nn.Module):
    """Sizes that layers of this kind compute themselves: half of one, in another rounding."""

    def __init__(self, half):
        super().__init__()
        self.linear, self.half = nn.Linear(8, 8), half

    def forward(self, x):
        rows = self.half(x.shape[1] / 2)
        y = F.adaptive_avg_pool2d(self.linear(x).unsqueeze(1), (rows, 8)).expand(-1, 2, -1, -1)
        return x + y.reshape(x.shape[0], 2 * rows, 8)[:, : x.shape[1]].mean(1, keepdim=True)


@pytest.mark.slow
@pytest.mark.parametrize("half", [math.ceil, math.floor, round, int, lambda n: int(math.ceil(n) / 2 * 2.0)])
def test_sizes_that_are_computed_inside_a_region(half):
    sizes = [(2, 37, 8), (3, 50, 8), (4, 71, 8)]
    model = nn.Sequential(*(Resized(half) for _ in range(4)))
    found = check(model, [torch.randn(sizes[0])], more=[[torch.randn(s)] for s in sizes[1:]], dynamic=True)
    assert found[0] >= 3


class ConvStage(nn.Module):
    def __init__(self, channels=4):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(x + self.norm2(self.conv2(y)), inplace=True)


@pytest.mark.parametrize("training", [True, False])
def test_convolutions_with_batch_norm(training):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), *(ConvStage() for _ in range(4))).train(training)
    x = torch.randn(2, 3, 6, 6)
    assert check(model, [x], more=[[x + 1]], tolerance=1e-4)[0] == 4


def test_buffers_updated_in_place():
    class Counting(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            self.calls += 1
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return super().forward(x) - self.mean

    assert check(Stack([Counting() for _ in range(4)]), [X], more=[[X * 2]]) == [4]


def test_a_buffer_that_the_gradient_depends_on_is_updated_in_place():
    class Scaling(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x):
            y = torch.tanh(self.linear(x) * self.scale.clone())
            self.scale.mul_(0.5)
            return x + y * self.scale.clone()

    assert check(Stack([Scaling() for _ in range(4)]), [X], more=[[X * 2]]) == [4]


def test_an_input_that_is_changed_after_the_layer():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("shift", torch.ones(8))

        def forward(self, x, other):
            return torch.sin(torch.tanh(x * 2) + self.shift) * other.sigmoid().exp()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.layers = nn.ModuleList(Layer() for _ in range(3))
            self.register_buffer("step", torch.ones(8))

        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                y = layer(x, self.step)
                x.add_(1)
                self.step.add_(1)
                x = x * y
            return x

    assert check(Net(), [X])[0] == 3


def test_one_buffer_updated_by_all_layers():
    class Shared(Block):
        def forward(self, x, total):
            total.add_(x.detach().sum())
            return super().forward(x) * torch.sigmoid(total)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.layers = nn.ModuleList(Shared() for _ in range(4))
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = layer(x, self.total)
            return x

    assert check(Net(), [X])[0] == 4


def test_an_activation_changed_in_place_without_gradients():
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            x += self.down(torch.relu(self.up(x)))
            return x

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Adds() for _ in range(4))

        def forward(self, x):
            with torch.no_grad():
                y = x * 2
                z = y.view(-1)
                for layer in self.layers:
                    y = layer(y)
            return y, z

    assert check(Net(), [X])[0] >= 2


def test_recurrent_steps_unrolled():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(8, 8)
            self.out = nn.Linear(8, 2)

        def forward(self, x):
            h = x.new_zeros(x.shape[0], 8)
            for t in range(x.shape[1]):
                h = self.cell(x[:, t], h)
            return self.out(h)

    check(Recurrent(), [torch.randn(3, 6, 8)])


def test_time_steps_without_modules():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.u = nn.Parameter(torch.randn(8, 8) / 3), nn.Parameter(torch.randn(8, 8) / 3)

        def forward(self, x):
            h = torch.tanh(x[:, 0] @ self.w)
            for t in range(1, 7):
                h = torch.tanh(x[:, t] @ self.w + h @ self.u) + h
            return h

    check(Plain(), [torch.randn(3, 7, 8)])


def test_functional_code_without_modules():
    weights = nn.ParameterList(nn.Parameter(torch.randn(8, 8) / 3) for _ in range(6))

    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = weights

        def forward(self, x):
            for w in self.weights:
                x = x + torch.tanh(F.layer_norm(x, (8,)) @ w) @ w.t()
            return x

    assert check(Functional(), [torch.randn(4, 8, requires_grad=True)])[0] >= 5


@pytest.mark.slow
def test_encoder_and_decoder():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.ModuleList(
                nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(3)
            )
            self.decoder = nn.ModuleList(
                nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(3)
            )
            self.first = nn.Linear(8, 8)

        def forward(self, x, y):
            x, y = self.first(x), self.first(y)
            for layer in self.encoder:
                x = layer(x)
            for layer in self.decoder:
                y = layer(y, x)
            return y

    found = check(Net(), [torch.randn(2, 5, 8), torch.randn(2, 4, 8)])
    assert found[:2] == [3, 3]


class Attends(nn.Module):
    """Attention of one sequence to another (or to itself) and a feed-forward part."""

    def __init__(self, width=8):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x, other):
        y = F.scaled_dot_product_attention(self.q(x), self.k(other), self.v(other))
        x = self.norm(x + self.out(y))
        return x + self.down(F.gelu(self.up(x)))


class Decodes(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm, self.cross = nn.LayerNorm(width), Attends(width)

    def forward(self, x, other):
        y = F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), is_causal=True)
        return self.cross(self.norm(x + self.out(y)), other)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_half_of_a_decoder_layer_calls_what_an_encoder_layer_does(dynamic):
    """Six copies of the same calls, wired in two ways: to take those first would split each layer of the decoder."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.ModuleList(Attends() for _ in range(3))
            self.decoder = nn.ModuleList(Decodes() for _ in range(3))

        def forward(self, x, y):
            for layer in self.encoder:
                x = layer(x, x)
            for layer in self.decoder:
                y = layer(y, x)
            return y

    inputs = [torch.randn(2, 5, 8, requires_grad=True) for _ in "xy"]
    more = [[torch.randn(3, 6, 8, requires_grad=True) for _ in "xy"]] if dynamic else []
    assert check(Net(), inputs, more=more, dynamic=dynamic) == [3, 3]
    assert all("*" in item.name and item.modules[0].count(".") == 1 for item in taken())


class Experts(nn.Module):
    """Every expert on every token, weighted by a router."""

    def __init__(self, experts=4):
        super().__init__()
        self.router = nn.Linear(8, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(experts)
        )

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            y = y + expert(x) * weights[:, i : i + 1]
        return x + y


def test_experts_alone_and_experts_inside_of_layers():
    assert check(Stack([Experts()]), [X])[0] == 4
    assert check(Stack([Experts() for _ in range(3)]), [X])[0] == 3
    assert fxpasses.stats().joint > 2  # the experts inside of the layer are a region of it


def test_sizes_that_the_first_layer_computes_for_all():
    """Dynamo computes a size once, where it is first needed: the layers are equal all the same."""

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            rows = x.reshape(x.shape[0] * x.shape[1], 8)
            rows = torch.tanh(self.linear(rows)) + torch.arange(rows.shape[0] * 2)[::2, None]
            return x + rows.view(x.shape)

    model = nn.Sequential(*(Flat() for _ in range(5)))
    inputs = [torch.randn(3, 4, 8, requires_grad=True)]
    (found,) = check(model, inputs, more=[[torch.randn(5, 2, 8, requires_grad=True)]], dynamic=True)
    assert found in (4, 5)  # all of four layers, or what is equal in all five


class Masked(nn.Module):
    """Attention under a mask that all layers share."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, mask):
        q, k, v = self.inner(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.outer(y.transpose(1, 2).flatten(2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["the same", "of each layer"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_mask_of_all_layers_is_saved_once(kind, dynamic):
    """Attention turns a mask of truth values into numbers, four times as large, in each layer."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layers = nn.Linear(8, 8), nn.ModuleList(Masked() for _ in range(5))

        def forward(self, x, mask):
            x = self.first(x)
            for number, layer in enumerate(self.layers):
                x = layer(x, mask if kind == "the same" else mask | (mask.cumsum(-1) == number))
            return x

    def inputs(rows):
        return [torch.randn(2, rows, 8), torch.rand(2, 1, rows, rows) > 0.3]

    model, kept = Net(), {}
    if kind == "the same":
        for regions in ("off", "always"):
            kept[regions] = saved_bytes(model, inputs(32), regions, dynamic=dynamic)
        assert 0 < kept["always"] <= 1.02 * kept["off"]
    assert check(model, inputs(6), more=[inputs(9)] if dynamic else [inputs(6)], dynamic=dynamic) == [5]


class ReadsAKey(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, key):
        return x + self.linear(torch.relu(self.linear(x) * key.reshape(4, -1)).sin())


class KeyOfAnEmptyCache(nn.Module):
    """The key of a cache that was empty: contiguous in Dynamo's graph, transposed after the decomposition of ``cat``."""

    def __init__(self):
        super().__init__()
        self.key, self.layers = nn.Linear(8, 8), nn.ModuleList(ReadsAKey() for _ in range(4))

    def forward(self, x):
        key = torch.cat([torch.tensor([]), self.key(x).view(4, 4, 2).transpose(1, 2)], -2)
        for layer in self.layers:
            x = layer(x, key)
        return x


def test_an_input_that_decompositions_lay_out_otherwise():
    assert check(KeyOfAnEmptyCache(), [X]) == [3]
