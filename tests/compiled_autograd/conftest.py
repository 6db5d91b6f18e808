"""Start every test with an empty cache, and check that it leaves nothing enabled."""

from collections.abc import Iterator

import pytest
import torch

import compiled_autograd
from compiled_autograd.session.session import sessions


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    torch.manual_seed(0)
    compiled_autograd.reset()
    engine = torch.autograd.Variable._execution_engine
    yield
    assert not sessions.stack
    assert torch.autograd.Variable._execution_engine is engine
    compiled_autograd.reset()
