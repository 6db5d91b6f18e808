"""Models that keep tensors from call to call, and mutations of these between two calls."""

import copy

import torch
from torch import nn


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.state, self.before = nn.Linear(4, 4), None, None

    def forward(self, x):
        self.state = x * 2 if self.state is None else torch.tanh(self.linear(x) + self.state)
        return self.state * 3


class Averaged(nn.Module):
    """A buffer that is another one after each call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("state", torch.zeros(4))

    def forward(self, x):
        y = self.linear(x)
        self.state = self.state * 0.9 + y.detach().mean(0) * 0.1
        return y - self.state


class Swapped(Recurrent):
    """Two states, of which one is where the other was."""

    def forward(self, x):
        if self.state is None:
            self.state, self.before = x + 1, x - 1
        self.state, self.before = self.linear(x) + self.before, self.state
        return self.state - self.before


class InPlace(Recurrent):
    """One that is also written to."""

    def forward(self, x):
        if self.state is None:
            self.state = x + 1
        else:
            self.state.mul_(0.5)
            self.state = self.state + self.linear(x)
        return self.state * 3


class Memory:
    def __init__(self):
        self.state, self.before, self.filled = None, None, False

    def update(self, x):
        if not self.filled:
            self.state, self.dtype, self.filled = torch.full_like(x, 0.5), x.dtype, True
        self.state = self.state + x
        return self.state


class Held(nn.Module):
    """A plain object keeps it."""

    def __init__(self):
        super().__init__()
        self.linear, self.memory = nn.Linear(4, 4), Memory()

    def forward(self, x):
        return self.linear(self.memory.update(x))


class Given(nn.Module):
    """One among the arguments does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, memory):
        return self.linear(memory.update(x))


class Layers(nn.Module):
    """Every layer has its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Averaged() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Tupled(nn.Module):
    """A tuple of states, behind a graph break: Dynamo does not trace an LSTM."""

    def __init__(self):
        super().__init__()
        self.lstm, self.state = nn.LSTM(4, 4), None

    def forward(self, x):
        y, self.state = self.lstm(x, self.state)
        self.state = tuple(part.detach() for part in self.state)
        return y


class Trainer:
    """Steps of an optimizer between a loss and its mean, which is kept."""

    def __init__(self):
        self.model, self.mean, self.steps = nn.Linear(4, 4), torch.zeros(()), 0
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.1)

    def step(self, x):
        loss = self.model(x).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.mean = self.mean * 0.9 + loss.detach() * 0.1
        self.steps += 1
        return loss.detach()


MODELS = {kind.__name__: kind for kind in (Recurrent, Averaged, Swapped, InPlace, Held, Given, Layers)}


def _set(make):
    def change(owner, model, x):
        owner.state = make(owner, x)

    return change


def _alias(owner, model, x):
    owner.before = owner.state


def _forget(owner, model, x):
    if not isinstance(owner, (Averaged, Layers)):
        owner.state, owner.filled = None, False


def _shared(owner, model, x):
    owners = getattr(model, "layers", [owner])
    owners[-1].state = owners[0].state


def _weight(owner, model, x):
    if not isinstance(
        owner, InPlace
    ):  # a weight that is mutated has no gradients, and AOTAutograd does not compile such a program
        linear = owner.linear if hasattr(owner, "linear") else model.linear
        owner.state = linear.weight.detach()[:2] if owner.state.dim() == 2 else linear.weight.detach()[0]


CHANGES = {
    "nothing": lambda owner, model, x: None,
    "its values": lambda owner, model, x: owner.state.fill_(2),
    "another one": _set(lambda owner, x: torch.ones_like(owner.state)),
    "another dtype": _set(
        lambda owner, x: owner.state.double() if isinstance(owner, Recurrent) else owner.state
    ),
    "another size": _set(lambda owner, x: owner.state[..., :1].clone()),
    "other strides": _set(lambda owner, x: torch.ones(*reversed(owner.state.shape)).t()),
    "a part of another one": _set(lambda owner, x: torch.stack([owner.state, owner.state])[1]),
    "a view of itself": _set(lambda owner, x: owner.state.view(owner.state.shape)),
    "the input": _set(lambda owner, x: x if owner.state.dim() == 2 else x[0]),
    "a weight": _weight,
    "one that is elsewhere, too": _alias,
    "that of another layer": _shared,
    "none": _forget,
}


def run(name, change, wrap):
    """Results and states of eight calls, with a change in the middle: those of a copy in eager, and those of what ``wrap`` makes of the model."""
    torch.manual_seed(0)
    model = MODELS[name]()
    found = []
    for how in (lambda f: f, wrap):
        one = copy.deepcopy(model)
        called = how(one)
        memory = Memory() if name == "Given" else None
        owner = memory or getattr(one, "memory", None) or getattr(one, "layers", [one])[0]
        linear = owner.linear if hasattr(owner, "linear") else one.linear
        results = []
        for step in range(8):
            x = torch.full((2, 4), 0.1 + step)
            if step == 4:
                CHANGES[change](owner, one, x)
            result = called(x) if memory is None else called(x, memory)
            states = [part.state for part in (owner, *getattr(one, "layers", ())) if part.state is not None]
            results.append([value.clone() for value in (result, *states)])
            places = [value.data_ptr() for value in (result, x, linear.weight, *states)]
            results[-1].append(torch.tensor([[a == b for a in places] for b in places]))
        found.append(results)
    return found


def differ(wanted, result):
    """Which calls differ."""
    return [
        i
        for i, (left, right) in enumerate(zip(wanted, result, strict=True))
        if not all(
            a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b)
            for a, b in zip(left, right, strict=True)
        )
    ]
