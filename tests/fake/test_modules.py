"""Conversions of modules with fake parameters change what they change in eager."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode as TorchFakeTensorMode

import fake


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        return self.second(self.first(x))


MODULES = {
    "linear": lambda: nn.Linear(4, 4),
    "tied": Tied,
    "lstm": lambda: nn.LSTM(4, 4, 2, batch_first=True),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
    "batch norm": lambda: nn.Sequential(nn.Unflatten(1, (4, 1)), nn.BatchNorm1d(4)),
    "transposed": lambda: nn.ConvTranspose1d(2, 3, 2),
}
CONVERSIONS = {
    "double": lambda m: m.double(),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "float": lambda m: m.float(),
    "to": lambda m: m.to(torch.float64),
    "to like": lambda m: m.to(torch.ones(1, dtype=torch.float64)),
    "meta": lambda m: m.to("meta"),
    "type": lambda m: m.type(torch.float64),
    "channels last": lambda m: m.to(memory_format=torch.preserve_format),
}


def run(module):
    x = torch.ones(2, 4)
    result = module(x.view(1, 2, 4) if isinstance(module, nn.ConvTranspose1d) else x)
    (result[0] if isinstance(result, tuple) else result).sum().backward()


def described(module, before):
    """What can be told of a module: each tensor, its gradient, and which of the old objects are still in it."""
    tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    return {
        name: (
            t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.is_leaf, isinstance(t, nn.Parameter),
            None if t.grad is None else (t.grad.shape, t.grad.dtype, t.grad.device, t.grad.requires_grad),
            [old for old, kept in before.items() if kept is t],
        )
        for name, t in tensors.items()
    }  # fmt: skip


def converted(make, convert, used, mode=None):
    module = make()
    if mode is not None:
        with fake.FakeCopyMode(mode):
            module = copy.deepcopy(module)
    if used:
        run(module)
    before = dict(module.named_parameters(remove_duplicate=False))
    convert(module)
    return module, described(module, before)


@pytest.mark.parametrize("used", [False, True], ids=["new", "after backward"])
@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("name", MODULES)
def test_built_in_the_mode(name, conversion, used):
    _, expected = converted(MODULES[name], CONVERSIONS[conversion], used)
    with fake.FakeTensorMode():
        _, actual = converted(MODULES[name], CONVERSIONS[conversion], used)
    assert actual == expected


@pytest.mark.parametrize("conversion", ["double", "meta", "bfloat16"])
@pytest.mark.parametrize("name", MODULES)
def test_copied_into_the_mode(name, conversion):
    _, expected = converted(MODULES[name], CONVERSIONS[conversion], False)
    mode = fake.FakeTensorMode()
    with mode:
        module, actual = converted(MODULES[name], CONVERSIONS[conversion], False, mode)
    assert actual == expected
    assert all(p.fake_mode is mode for p in module.parameters())


def test_converted_outside_of_the_mode():
    with fake.FakeTensorMode():
        module = nn.Linear(4, 4)
    module.double()
    assert module.weight.dtype is torch.float64
    assert module(module.weight.detach()).dtype is torch.float64


def test_an_optimizer_goes_on_with_the_same_parameters():
    with fake.FakeTensorMode():
        module = nn.Linear(4, 4)
        watched = weakref.ref(module.weight)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        module.to(torch.float64)
        module(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()
    assert watched() is module.weight is optimizer.param_groups[0]["params"][0]
    assert optimizer.state[module.weight]["momentum_buffer"].dtype is torch.float64


def test_to_another_device():
    if not fake.allow_cuda():
        pytest.skip("no libc10 to look into")
    with fake.FakeTensorMode():
        module = nn.Linear(4, 4).to("cuda:1")
        assert {p.device for p in module.parameters()} == {torch.device("cuda:1")}
        assert module(torch.ones(2, 4, device="cuda:1")).device == torch.device("cuda:1")
        with pytest.raises(RuntimeError, match="device"):
            module(torch.ones(2, 4))


def test_new_objects_if_they_are_asked_for():
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with fake.FakeTensorMode():
            module = nn.Linear(4, 4)
            before = module.weight
            module.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert module.weight is not before
    assert (before.dtype, module.weight.dtype) == (torch.float32, torch.float64)


def test_fake_and_other_parameters_in_one_module():
    module = nn.Linear(4, 4)
    real = module.bias
    with fake.FakeTensorMode() as mode:
        module.weight = mode.from_tensor(module.weight)
    weight = module.weight
    module.double()
    assert module.weight is weight
    assert module.bias is real
    assert list(module._parameters) == ["weight", "bias"]
    assert weight.dtype is real.dtype is torch.float64


def test_a_refused_conversion_changes_nothing():
    with fake.FakeTensorMode():
        module = nn.Linear(4, 4)
        weight, bias = module.weight, module.bias

        def fail(tensor):
            if tensor is bias:
                raise ValueError("not this one")
            return tensor.double()

        with pytest.raises(ValueError, match="not this one"):
            module._apply(fail)
    assert module.weight is weight
    assert module.bias is bias


def test_modules_with_data_and_of_torchs_mode_are_torchs():
    module = nn.Linear(2, 2)
    weight = module.weight
    assert module.double().weight is weight
    with TorchFakeTensorMode(), pytest.raises(RuntimeError, match="swap"):
        nn.Linear(2, 2).double()
    with fake.FakeTensorMode():
        assert nn.Linear(2, 2).double().weight.dtype is torch.float64


def test_compiled_code_may_convert_modules():
    compiled = torch.compile(lambda x: nn.Linear(3, 3).double()(x), backend="eager")
    assert compiled(torch.ones(2, 3, dtype=torch.float64)).dtype is torch.float64
