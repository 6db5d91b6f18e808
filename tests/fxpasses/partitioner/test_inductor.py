"""The partitioner inside Inductor."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from fxpasses.partitioner import META_KEY, MinCutPartitioner, PartitionOptionError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nn.functional.dropout(
            torch.nn.functional.gelu(self.norm(self.first(x))), 0.25, self.training
        )
        return self.second(y).softmax(-1)


@pytest.mark.slow
def test_trains_like_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """With symbolic sizes; all tests of the backend that go through Inductor train with fixed ones."""
    budget, reports = 0.25, []
    call = MinCutPartitioner.__call__

    def recorded(self: MinCutPartitioner, *args: object, **kwargs: object) -> object:
        forward, backward = call(self, *args, **kwargs)  # type: ignore[arg-type]
        reports.append(forward.meta[META_KEY])
        return forward, backward

    monkeypatch.setattr(MinCutPartitioner, "__call__", recorded)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net().train()
    mirror = copy.deepcopy(model)
    with torch._inductor.config.patch(
        custom_partitioner_fn=MinCutPartitioner(budget), fallback_random=True, force_disable_caches=True
    ):
        compiled = torch.compile(mirror, dynamic=True)
        for rows in (5, 5):
            x = torch.randn(rows, 6)
            torch.manual_seed(rows)
            expected = model(x)
            expected.square().sum().backward()
            torch.manual_seed(rows)
            actual = compiled(x)
            actual.square().sum().backward()
            torch.testing.assert_close(actual, expected)
    for ours, theirs in zip(mirror.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(mirror.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert reports[0].memory_budget == budget


def test_identity_follows_the_budget() -> None:
    assert MinCutPartitioner(0.5).uuid() == MinCutPartitioner(0.5).uuid()
    assert MinCutPartitioner(0.5).uuid() != MinCutPartitioner(0.25).uuid()


def test_impossible_budget_is_refused_at_once() -> None:
    with pytest.raises(PartitionOptionError, match="between 0 and 1"):
        MinCutPartitioner(2.0)


@pytest.mark.slow
def test_equal_graphs_are_found_in_the_cache_again() -> None:
    """The report in the forward graph's meta, with its seconds, is no part of Inductor's cache key."""
    with (
        fresh_cache(),
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._inductor.config.patch(custom_partitioner_fn=MinCutPartitioner(0.5)),
    ):
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            torch.compile(lambda x: (x.sin() * x).exp())(torch.randn(3, requires_grad=True)).sum().backward()
        assert counters["inductor"]["fxgraph_cache_hit"] == 2
        assert counters["inductor"]["fxgraph_cache_miss"] == 0
