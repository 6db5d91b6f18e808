"""Layers that differ from each other are not copied, and copied layers that change are compiled again."""

import pytest
import torch
from torch import nn

from fxpasses import stats
from tests.fxpasses.dynamo.support import COPIED, LAYERS, Layer, Stack, agree, compiled


def change_eps(layer):
    layer.norm.eps = 0.3


def change_constant(layer):
    layer.scale = 0.5


def tensor_for_constant(layer):
    layer.scale = torch.tensor(1.0)


def add_hook(layer):
    layer.linear.register_forward_hook(lambda module, args, out: out * 3)


def add_pre_hook(layer):
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def drop_everything(layer):
    layer.drop.p = 1.0


def evaluate(layer):
    layer.drop.p = 1.0
    layer.eval()


def freeze(layer):
    layer.linear.weight.requires_grad_(False)


def no_bias(layer):
    layer.linear.bias = None


def replace_activation(layer):
    layer.drop = nn.Tanh()


def patch_forward(layer):
    layer.forward = lambda x: x * 5


def patch_inner_forward(layer):
    layer.linear.forward = lambda x: x * 5


def change_weights_layout(layer):
    layer.linear.weight = nn.Parameter(layer.linear.weight.detach().t().contiguous().t())


def make_buffer(layer):
    weight = layer.linear.weight.detach().clone()
    del layer.linear.weight
    layer.linear.register_buffer("weight", weight)


CHANGES = [
    change_eps,
    change_constant,
    add_hook,
    add_pre_hook,
    drop_everything,
    evaluate,
    freeze,
    no_bias,
    replace_activation,
    patch_forward,
    patch_inner_forward,
    change_weights_layout,
    make_buffer,
]


# The first layer is traced, the second too, the others are copies: see COPIED. One place of them goes through all stages.
@pytest.mark.parametrize("change", [*CHANGES, tensor_for_constant], ids=lambda c: c.__name__)
@pytest.mark.parametrize(("place", "dynamic"), [(0, False), (1, False), (3, False), (LAYERS - 1, True)])
def test_a_layer_that_differs_is_not_copied(change, place, dynamic, request):
    if place != 3:
        request.getfixturevalue("as_traced")
    model, x = Stack(), torch.randn(3, 8)
    change(model.layers[place])
    agree(model, compiled(model, dynamic), x)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_copied_layer_that_is_changed_later_is_compiled_again(dynamic, request):
    """One compiled model for all changes: another model of the same layers runs its code as long as nothing differs."""
    if dynamic:
        request.getfixturevalue("as_traced")
    counted, x = torch._dynamo.utils.counters["stats"], torch.randn(3, 8)
    before = counted["unique_graphs"]
    with torch._dynamo.config.patch(
        skip_nnmodule_hook_guards=False,  # torch does not look for new hooks by default
        recompile_limit=len(CHANGES) + 1,
    ):
        for number, change in enumerate(CHANGES, 1):
            model = Stack()
            call = compiled(model, dynamic)
            agree(model, call, x)
            assert counted["unique_graphs"] == before + number, f"compiled again before {change.__name__}"
            if number == 1:
                assert stats().copied_calls == COPIED
            change(model.layers[4])
            agree(model, call, x)
    assert counted["unique_graphs"] == before + 1 + len(CHANGES)


@pytest.mark.usefixtures("as_traced")
def test_a_tensor_that_is_only_looked_at():
    class Looks(Layer):
        def __init__(self):
            super().__init__()
            self.flag = torch.nn.Parameter(torch.zeros(2))

        def forward(self, x):
            y = super().forward(x)
            return y * 2 if self.flag.requires_grad else y

    model, x = Stack(Looks), torch.randn(3, 8)
    call = compiled(model)
    agree(model, call, x)
    assert stats().copied_calls == COPIED
    model.layers[4].flag.requires_grad_(False)
    agree(model, call, x)


def test_a_zero_with_another_sign():
    class Takes(Layer):
        def forward(self, x, number):
            return super().forward(x) + torch.atan2(torch.zeros_like(x) * number, -torch.ones_like(x))

    class Caller(Stack):
        def forward(self, x):
            for place, layer in enumerate(self.layers):
                x = layer(x, -0.0 if place == 4 else 0.0)
            return x

    model = Caller(Takes)
    agree(model, compiled(model), torch.randn(3, 8))


def test_an_attribute_that_cannot_be_read():
    class Refuses(Layer):
        def forward(self, x):
            return super().forward(x) * (self.extra if hasattr(self, "extra") else 1.0)

    model, x = Stack(Refuses), torch.randn(3, 8)
    for layer in model.layers[:4]:
        layer.extra = 2.0
    agree(model, compiled(model), x)


@pytest.mark.usefixtures("as_traced")
@pytest.mark.parametrize("without", [None, 0, 4])
def test_one_hook_on_several_layers(without):
    def triple(module, args, out):
        return out * 3

    model, x = Stack(), torch.randn(3, 8)
    for place, layer in enumerate(model.layers):
        if place != without:
            layer.linear.register_forward_hook(triple)
    agree(model, compiled(model), x)


@pytest.mark.usefixtures("as_traced")
@pytest.mark.parametrize("place", [0, 4])
def test_a_dictionary_in_another_order(place):
    class InOrder(Layer):
        def __init__(self):
            super().__init__()
            self.factors = {"first": 2.0, "second": 3.0}

        def forward(self, x):
            y = super().forward(x)
            for number, factor in enumerate(self.factors.values()):
                y = y + number * factor
            return y

    model, x = Stack(InOrder), torch.randn(3, 8)
    call = compiled(model)
    agree(model, call, x)
    model.layers[place].factors = {"second": 3.0, "first": 2.0}
    agree(model, call, x)
    agree(model, compiled(model), x)
