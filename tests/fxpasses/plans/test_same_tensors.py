"""Tensors are looked at again: by torch's guards and in memory, with the same answers."""

import weakref

import pytest
import torch

from fxpasses.plans._torch import SameState
from fxpasses.plans.tensors.same_tensors import SameDataPointers, SameTensors


def _parameter():
    return torch.nn.Parameter(torch.randn(4, 4))


def _data(make):
    return lambda t: setattr(t, "data", make(t.data))


def _kept_views(t):
    t.kept = [t.view(-1), t * t, weakref.ref(t)]


CHANGES = {
    "sizes": _data(lambda d: torch.ones(2, 4)),
    "strides": lambda t: t.transpose_(0, 1),
    "other strides of other memory": _data(lambda d: d.clone().transpose(0, 1)),
    "one stride": lambda t: t.as_strided_(t.shape, (1, *t.stride()[1:])),
    "a dimension": lambda t: t.squeeze_(-1) if t.dim() > 5 else t.unsqueeze_(0),
    "dtype": _data(lambda d: d.half()),
    "complex": _data(lambda d: d.to(torch.complex64)),
    "frozen": lambda t: t.requires_grad_(False),
    "a tensor of its name": lambda t: setattr(t, "__class__", torch.Tensor),
    "another tensor": lambda t: torch.utils.swap_tensors(t, torch.nn.Parameter(torch.randn(3))),
    "a view of larger memory": lambda t: t.set_(torch.randn(90), 3, (3, 3)),
}
HARMLESS = {
    "nothing": lambda t: None,
    "values": lambda t: t.add_(1),
    "other memory": _data(torch.clone),
    "a gradient": lambda t: setattr(t, "grad", torch.ones_like(t)),
    "what refers to it": _kept_views,
    "a hook": lambda t: t.register_hook(lambda g: g),
}


@pytest.mark.parametrize("make", [_parameter, lambda: torch.nn.Parameter(torch.randn(1, 2, 2, 2, 2, 2, 1))])
@pytest.mark.parametrize("change", [*CHANGES, *HARMLESS])
def test_every_change_is_noticed(checks, change, make):
    tensors = [_parameter(), make(), _parameter()]
    same = SameTensors(tensors)
    assert same.hold()
    assert same.hold()
    assert (same._memory is not None) == (checks == "memory")
    with torch.no_grad():
        (CHANGES | HARMLESS)[change](tensors[1])
    for _ in range(2):
        assert same.hold() == (change in HARMLESS)


MOVES = {
    "other memory": _data(torch.clone),
    "memory of another": lambda t: t.set_(torch.zeros(90), 3, (4, 4)),
    "a larger memory": lambda t: t.untyped_storage().resize_(48000),
    "a place in the same memory": lambda t: t.set_(t.untyped_storage(), 4, (2, 4)),
}


@pytest.mark.parametrize("move", [*MOVES, *(name for name in HARMLESS if name not in MOVES)])
def test_every_move_is_noticed(checks, move):
    tensors = [_parameter(), _parameter(), torch.empty(0)]
    places = SameDataPointers(tensors)
    assert places.hold()
    assert places.hold()
    assert (places._memory is not None) == (checks == "memory")
    with torch.no_grad():
        (HARMLESS | MOVES)[move](tensors[1])
    for _ in range(2):
        assert places.hold() == (move not in MOVES)


def test_a_history_is_noticed(checks):
    buffer, parameter = torch.zeros(4, 4), _parameter()
    same = SameTensors([buffer])
    assert same.hold()
    assert same.hold()
    buffer.mul_(parameter)
    assert not same.hold()


def test_what_was_changed_back_is_compared_again(checks):
    parameter = _parameter()
    same = SameTensors([parameter])
    for _ in range(3):
        assert same.hold()
        before, parameter.data = parameter.data, torch.ones(2, 4)
        assert not same.hold()
        parameter.data = before


def test_dispatch_keys_of_the_thread_count(checks):
    same = SameState()
    assert same.holds()
    with torch._C._AutoDispatchBelowAutograd():
        assert not same.holds()
    assert same.holds()


def test_no_tensors_and_unusual_ones(checks):
    assert SameTensors([]).hold()
    many = torch.randn([1] * 7)
    only = SameTensors([many])
    assert only.hold()
    many.resize_([2] * 7)
    assert not only.hold()
