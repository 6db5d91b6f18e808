"""Small models for plans."""

import collections
import dataclasses

import torch
from torch import nn


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)) for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).relu()
        return [x.sum(), {"x": x, "count": 3}], None


class View(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * self.weight, x[0]


class SideEffect(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.count = nn.Parameter(torch.ones(8)), 0

    def forward(self, x):
        self.count += 1
        return x * self.weight


class Notes:
    def __init__(self):
        self.seen = []


class ChangedObject(SideEffect):
    def __init__(self):
        super().__init__()
        self.notes = Notes()

    def forward(self, x):
        self.notes.seen.append(1)
        return x * self.weight


Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass
class Answer(collections.OrderedDict):
    """As results of transformers are: a dictionary whose entries are attributes as well."""

    logits: torch.Tensor
    rest: Pair | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            self[field.name] = getattr(self, field.name)


class Results(SideEffect):
    def forward(self, x):
        y = x * self.weight
        return Answer(y, Pair(x, [y.max(0), self.weight]))


class GraphBreak(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        y = x * self.weight
        torch._dynamo.graph_break()
        return y.sin()


MODELS = {
    "repeated": Repeated,
    "inference": lambda: nn.Sequential(nn.Linear(8, 4), nn.GELU()),
    "training": lambda: nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 2)),
    "sizes": lambda: nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)),
    "batch norm": lambda: nn.BatchNorm1d(8),
    "view": View,
    "side effect": SideEffect,
    "object": ChangedObject,
    "results": Results,
    "graph break": GraphBreak,
}


def inputs(batch=4):
    return (torch.arange(batch * 8.0).reshape(batch, 8).sin(),)


def batches(name):
    """The batch sizes of the calls of a model."""
    return (4, 5, 6, 4) if name == "sizes" else (4, 4, 4)
