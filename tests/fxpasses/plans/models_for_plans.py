"""Small models for tests of plans."""

import collections
import contextvars
import dataclasses
import functools
import os
import threading
import weakref

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


class RepeatedSizes(Repeated):
    def forward(self, x):
        return super().forward(x)[0][1]["x"]


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.kind = nn.Parameter(torch.ones(8)), None


class SharedMemory(Weighted):
    """Outputs that are inputs, views of inputs, weights and other outputs."""

    def forward(self, x):
        y = (x * self.weight).tanh()
        z = y + 1
        of_input = x, x.view(-1)[3:], x.t(), x.unfold(1, 2, 1), x.view(torch.int32), x.diagonal()
        return of_input, self.weight[2:], y[0], y, z[1:].t(), z.unsqueeze(0).expand(2, -1, -1).detach()


class SharedSizes(Weighted):
    def forward(self, x):
        y = (x * self.weight).tanh()
        return x.reshape(-1), y.reshape(-1)[1:], y.unfold(1, 2, 1)


class ChangedInput(Weighted):
    def forward(self, x):
        x.mul_(2)
        with torch.no_grad():
            self.weight.mul_(0.5)
        return x * self.weight


@functools.lru_cache
def half_of(number):
    return number / 2


class References(Weighted):
    """A weak reference, as ``LSTM`` has them, caches of functions and a lock."""

    def __init__(self):
        super().__init__()
        self.of_weights, self.lock = [weakref.ref(self.weight), None], threading.Lock()
        self.factors = weakref.WeakValueDictionary({"weight": self.weight})

    @functools.cached_property
    def text(self):
        return "unused"

    def forward(self, x):
        return x * self.of_weights[0]() * half_of(x.shape[-1])


class SetsAttribute(Weighted):
    def forward(self, x):
        if self.kind is None:
            self.kind = "one"
        return x * self.weight


class Notes:
    def __init__(self):
        self.seen, self.kinds = [], set()


class ChangedObject(Weighted):
    def __init__(self):
        super().__init__()
        self.notes = Notes()

    def forward(self, x):
        self.notes.kinds.add(x.dim())
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


class Results(Weighted):
    def forward(self, x):
        y = x * self.weight
        return Answer(y, Pair(x, [y.max(0), self.weight]))


class State:
    def __init__(self):
        self.active, self.variable = None, contextvars.ContextVar("state", default=None)


STATE = State()


def with_state(function):
    @functools.wraps(function)
    def run(self, *args, **kwargs):
        kwargs.pop("unused", None)
        before, STATE.active = STATE.active, True
        try:
            return function(self, *args, **kwargs)
        finally:
            STATE.active = before

    return run


class SetsBack(Weighted):
    """As models of transformers do: it sets an attribute and sets it back, reads a variable, and has a tensor that is written in its code."""

    @with_state
    def forward(self, x):
        y = x * self.weight + torch.tensor([1.0, 2.0, 4.0, 8.0]).repeat(2)
        assert STATE.active
        return {
            "y": y * 2 if os.environ.get("UNKNOWN", "0") == "1" else y,
            "dtype": y.dtype,
            "device": y.device,
            "p": 0.5,
        }


class GraphBreak(ChangedObject):
    def forward(self, x):
        y = x * self.weight
        with torch.no_grad():
            z = y.cos()
            print(end="")  # Dynamo does not trace this
            z = z + 1
        return {"first": y.sin() + z, "second": y + 1}, self.notes


MODELS = {
    "repeated": Repeated,
    "inference": lambda: nn.Sequential(nn.Linear(8, 4), nn.GELU()),
    "training": lambda: nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 2)),
    "sizes": lambda: nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)),
    "batch norm": lambda: nn.BatchNorm1d(8),
    "shared memory": SharedMemory,
    "shared sizes": SharedSizes,
    "changed input": ChangedInput,
    "references": References,
    "repeated sizes": RepeatedSizes,
    "attribute": SetsAttribute,
    "object": ChangedObject,
    "results": Results,
    "sets back": SetsBack,
    "graph break": GraphBreak,
}


def inputs(batch=4):
    return (torch.arange(batch * 8.0).reshape(batch, 8).sin(),)


def batches(name):
    """The batch sizes of the calls of a model."""
    return (4, 5, 6, 4) if name.endswith("sizes") else (4, 4, 4)
