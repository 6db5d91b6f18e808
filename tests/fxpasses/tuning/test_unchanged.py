"""Tensors that are known to be unchanged without being read, and what writes to them without a trace."""

import io
import threading

import numpy
import pytest
import torch

from fxpasses.tuning import _torch, unchanged
from fxpasses.tuning.unchanged import ChangeDetector


def a_weight():
    return torch.nn.Parameter(torch.arange(24.0).reshape(4, 6))


def may_not_compare(*_):
    raise AssertionError("bits were compared")


def add_in_place(p):
    with torch.no_grad():
        p.add_(1)


WRITES = {
    "in place": add_in_place,
    "through .data": lambda p: p.data.neg_(),
    "through NumPy": lambda p: p.data.numpy().__setitem__((0, 0), 7),
    "through DLPack": lambda p: numpy.from_dlpack(p.detach()).__setitem__((0, 0), 7),
    "other data": lambda p: setattr(p, "data", torch.ones(4, 6)),
    "other data of the same memory": lambda p: setattr(p, "data", p.data.flatten()[1:19].reshape(3, 6)),
    "its storage": lambda p: p.untyped_storage().fill_(1),
    "shared with other processes": lambda p: p.share_memory_()[0].data.zero_(),
    "no memory any more": lambda p: p.untyped_storage().resize_(0),
    "a loaded state": lambda p: torch.nn.ParameterDict({"p": p}).load_state_dict({"p": torch.zeros(4, 6)}),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_writes_are_seen_though_nothing_is_read(write, monkeypatch):
    weight, other, bits = a_weight(), a_weight(), unchanged._memcmp
    known = ChangeDetector([1, 2], [None, weight, other])
    monkeypatch.setattr(unchanged, "_memcmp", may_not_compare)
    assert known.are_unchanged([None, weight, other])
    assert known.are_unchanged([None, weight, other])
    monkeypatch.setattr(unchanged, "_memcmp", bits)
    write(weight)
    assert not known.are_unchanged([None, weight, other])


def from_numpy():
    array = numpy.ones((4, 6), "float32")
    return torch.from_numpy(array), lambda: array.__setitem__((0, 0), 7)


def with_an_array():
    weight = a_weight()
    array = weight.detach().numpy()
    return weight, lambda: array.__setitem__((0, 0), 7)


def buffer_with_an_array():
    buffer = torch.ones(4, 6)
    array = buffer.numpy()
    return buffer, lambda: array.__setitem__((0, 0), 7)


def exported():
    buffer = torch.ones(4, 6)
    view = torch.from_dlpack(torch.utils.dlpack.to_dlpack(buffer))
    return buffer, lambda: view.zero_()


def shared():
    value = torch.ones(4, 6).share_memory_()
    return value, lambda: value.data.zero_()


@pytest.mark.parametrize("make", [from_numpy, with_an_array, buffer_with_an_array, exported, shared])
def test_memory_that_others_had_before_is_compared(make):
    value, write = make()
    known = ChangeDetector([0], [value])
    assert known.are_unchanged([value])
    write()
    assert not known.are_unchanged([value])


def test_what_is_only_read_holds_and_is_watched_again(monkeypatch):
    weight, compared = a_weight(), []
    known = ChangeDetector([0], [weight])
    bits = unchanged._memcmp
    monkeypatch.setattr(unchanged, "_memcmp", lambda *args: compared.append(args) or bits(*args))
    for _ in range(3):
        torch.save(weight, io.BytesIO())  # asks for a pointer to write to
        assert known.are_unchanged([weight])
    assert 0 < len(compared) <= 3
    for _ in range(3):
        assert known.are_unchanged([weight])
    compared.clear()
    assert known.are_unchanged([weight])
    assert not compared
    weight.data.add_(1)
    assert not known.are_unchanged([weight])


def test_nothing_to_watch_holds():
    assert ChangeDetector([], [a_weight()]).are_unchanged([a_weight()])


def test_the_copy_takes_no_memory_until_a_tensor_is_written_to():
    weight = a_weight()
    copy = _torch.lazy_copy(weight)
    assert _torch.storage_address(copy) == _torch.storage_address(weight)
    weight.data.zero_()
    assert _torch.storage_address(copy) != _torch.storage_address(weight)
    assert copy.equal(torch.arange(24.0).reshape(4, 6))


def test_threads_that_read_at_the_same_time_find_the_same_values():
    for _ in range(20):
        weights = [torch.nn.Parameter(torch.ones(1 << 14)) for _ in range(20)]
        known = ChangeDetector(range(20), weights)
        wrong, start = [], threading.Barrier(3)

        def read(weights=weights, wrong=wrong, start=start):
            start.wait()
            for weight in weights:
                weight.data_ptr()
                if weight.sum() != 1 << 14:
                    wrong.append(weight)

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert known.are_unchanged(weights)
