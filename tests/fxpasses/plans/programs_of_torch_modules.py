"""Models that are torch's own modules, whose calls Dynamo traces through, with parts that keep state."""

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = None

    def forward(self, x):
        mean = x.detach().mean(0)
        self.mean = mean if self.mean is None else self.mean * 0.9 + mean * 0.1
        return x - self.mean


class Breaks(nn.Module):
    def forward(self, x):
        x = torch.sin(x)
        torch._dynamo.graph_break()
        return torch.cos(x)


def _hooked(linear):
    linear.register_forward_hook(lambda module, args, output: setattr(module, "last", output.detach()))
    return linear


WRAPPED = {
    "a state": lambda linear: nn.Sequential(linear, Mean()),
    "a graph break": lambda linear: nn.Sequential(linear, Breaks()),
    "a hook that keeps": _hooked,
    "pruned": lambda linear: prune.l1_unstructured(linear, "weight", 0.3),
    "spectral_norm": parametrizations.spectral_norm,
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "spectral_norm of old": spectral_norm,
    "weight_norm of old": weight_norm,
}


def run(name, wrap):
    """Which steps of a short training, and of inference after it, differ from those in eager."""
    results = []
    for compiles in (lambda model: model, wrap):
        torch.manual_seed(0)
        model = nn.Sequential(WRAPPED[name](nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        called, found = compiles(model), []
        for step in range(5):
            x = torch.full((3, 4), 0.1 + step / 10).cumsum(0)
            if step == 4:
                model.eval()
            y = called(x)
            y.pow(2).sum().backward()
            found.append([y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
            optimizer.step()
            optimizer.zero_grad()
        results.append(found)
    return [
        i
        for i, (left, right) in enumerate(zip(*results, strict=True))
        if len(left) != len(right)
        or not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(left, right, strict=True))
    ]
