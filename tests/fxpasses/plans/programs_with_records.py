"""Functions that take dataclass objects, lists and dictionaries, new ones in each call, and mutate them."""

import dataclasses
from typing import Any

import torch

weight = torch.linspace(-1, 1, 64).reshape(8, 8)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    kind: str = "l2"

    def __post_init__(self):
        self.extra = (None, True)

    def twice(self):
        return self.x * 2


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    inner: Any = None
    scale: float = 0.5


@dataclasses.dataclass
class Cache:
    k: Any = None


@dataclasses.dataclass
class State:
    """One object for many calls, which counts and collects."""

    linear: Any
    total: Any
    steps: int = 0
    losses: list[float] = dataclasses.field(default_factory=list)


def loss(batch):
    difference = batch.twice() @ weight - batch.y
    return difference.pow(2).mean() if batch.kind == "l2" else difference.abs().mean()


def scaled(frozen):
    return frozen.x @ weight * frozen.scale


def step(x, state):
    state.total = state.total + state.linear(x)
    return state.total * 2


def nested(frozen):
    return frozen.x @ weight + (0 if frozen.inner is None else frozen.inner.x)


def put(batch):
    batch.y = batch.x @ weight
    return batch.y.sum()


def make(x):
    return Batch(x + 1, x - 1)


def grow(x, cache):
    k = x @ weight
    cache.k = k if cache.k is None else torch.cat([cache.k, k])
    return (cache.k @ x.t()).sum(0)


def append(x, values):
    values.append(x @ weight)
    return sum(values)


def enter(x, values):
    values["x"] = x @ weight
    return sum(values.values())


def in_both(a, b):
    a.append(a[0] @ weight)
    return b[-1] + len(b)


def in_both_objects(a, b):
    a.x = a.x @ weight
    return b.x + 1


def _x(i, rows=4):
    return torch.linspace(0, 1 + i, rows * 8).reshape(rows, 8)


def _twice(value, copy):
    return lambda i: (lambda made: (made, made if i % 2 else copy(made)))(value(i))


CASES = {
    "loss": (loss, lambda i: (Batch(_x(i), _x(i + 1)),)),
    "other text": (loss, lambda i: (Batch(_x(i), _x(i + 1), ["l1", "l2"][i % 2]),)),
    "other numbers": (scaled, lambda i: (Frozen(_x(i), scale=0.5 + i % 2),)),
    "other sizes": (loss, lambda i: (Batch(_x(i, 3 + i), _x(i + 1, 3 + i)),)),
    "one tensor": (put, lambda i: (Batch(_x(i), _x(i)) if i % 2 else Batch(*[_x(i)] * 2),)),
    "nested": (nested, lambda i: (Frozen(_x(i), Frozen(_x(i + 3)) if i % 2 else None),)),
    "put": (put, lambda i: (Batch(_x(i), _x(i)),)),
    "make": (make, lambda i: (_x(i),)),
    "grow": (grow, lambda i: (_x(i, 1), Cache(_x(i, 2 + i) if i else None))),
    "append": (append, lambda i: (_x(i), [_x(i + 1)])),
    "enter": (enter, lambda i: (_x(i), {"x": _x(i)} if i % 2 else {"y": _x(i)})),
    "one list": (in_both, _twice(lambda i: [_x(i)], lambda made: [made[0].clone()])),
    "one object": (
        in_both_objects,
        _twice(lambda i: Batch(_x(i), _x(i)), lambda made: Batch(made.x.clone(), made.y)),
    ),
}


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [inner for item in value.values() for inner in _tensors(item)]
    if isinstance(value, (list, tuple)):
        return [inner for item in value for inner in _tensors(item)]
    if isinstance(value, float):
        return [torch.tensor(value)]
    return _tensors(vars(value)) if hasattr(value, "__dict__") else []


def run(name, wrap, calls=range(7)):
    """The calls of which results or arguments differ from those in eager. Args: which case, what compiles, and the numbers of the calls."""
    function, given = CASES[name]
    compiled, differ = wrap(function), []
    for i in calls:
        mine, theirs = given(i), given(i)
        left, right = _tensors((compiled(*mine), mine)), _tensors((function(*theirs), theirs))
        if not all(torch.allclose(a, b) for a, b in zip(left, right, strict=True)):
            differ.append(i)
    return differ
