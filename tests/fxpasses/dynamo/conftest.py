"""Settings for the tests of Dynamo's tracing."""

import pytest
import torch

from fxpasses import reset_stats
from fxpasses.dynamo import _torch as dynamo_torch
from fxpasses.pass_manager.limits import VARIABLE, Limits


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="this torch cannot compare guards as values")
    for item in items:
        if "test_replay" in item.path.name and not dynamo_torch.CAN_REPLAY:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    reset_stats()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # these tests are not about rounding
    yield
    torch.set_default_dtype(torch.float32)
    torch._dynamo.reset()


@pytest.fixture
def as_traced(monkeypatch):
    """Dynamo's graphs run as they are: a wrong copy shows there, in half of the time that AOTAutograd and the rest would take, too."""
    monkeypatch.setenv(VARIABLE, Limits(stage="eager").to_json())
