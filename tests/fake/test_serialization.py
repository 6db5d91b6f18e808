"""Saving and loading in the mode."""

import copy
import io
import pickle

import pytest
import torch

from fake import FakeTensor, FakeTensorMode


def test_saved_without_data_and_pickled_not_at_all():
    buffer = io.BytesIO()
    with FakeTensorMode():
        state = torch.nn.Linear(3, 4).state_dict()
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(state, buffer)
        with pytest.raises(TypeError, match="skip_data"):
            pickle.dumps(state)
        assert type(copy.copy(state["weight"])) is FakeTensor
    buffer.seek(0)
    loaded = torch.load(buffer)
    assert {name: (type(t), t.shape) for name, t in loaded.items()} == {
        "weight": (torch.Tensor, (4, 3)),
        "bias": (torch.Tensor, (4,)),
    }


def test_pickle_and_load():
    real = torch.tensor([0])
    with FakeTensorMode():
        assert type(pickle.loads(pickle.dumps(real))) is FakeTensor
    buffer = io.BytesIO()
    torch.save(torch.nn.Linear(5, 10).state_dict(), buffer)
    for location, device in ((None, "cpu"), ("cuda", "cuda")):
        buffer.seek(0)
        with FakeTensorMode():
            loaded = torch.load(buffer, map_location=location)
        assert loaded["weight"].device.type == device
        assert type(loaded["weight"]) is FakeTensor
