"""Models with caches that grow in each call, and mutations of the caches between two calls."""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, cache):
        k, v = cache.update(self.k(x), self.v(x))
        return x + F.scaled_dot_product_attention(self.q(x), k, v)


class Layers(nn.Module):
    """Two layers with a cache each, which are among the arguments."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x, caches):
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache)
        return x


class InAttributes:
    def __init__(self):
        self.k, self.v = None, None

    def get(self):
        return self.k, self.v

    def set(self, k, v):
        self.k, self.v = k, v

    def update(self, k, v):
        known = self.get()
        if known[0] is not None:
            k, v = torch.cat([known[0], k], 1), torch.cat([known[1], v], 1)
        self.set(k, v)
        return k, v


class InTuple(InAttributes):
    def __init__(self):
        self.both = None

    def get(self):
        return self.both or (None, None)

    def set(self, k, v):
        self.both = (k, v)


class InDictionary(InAttributes):
    def __init__(self):
        self.parts = {}

    def get(self):
        return self.parts.get("k"), self.parts.get("v")

    def set(self, k, v):
        self.parts["k"], self.parts["v"] = k, v


class InList(InAttributes):
    def __init__(self):
        self.parts = []

    def get(self):
        return self.parts or [None, None]

    def set(self, k, v):
        if self.parts:
            self.parts[0], self.parts[1] = k, v
        else:
            self.parts.append(k)
            self.parts.append(v)


class Appended(InAttributes):
    """What each call brings is one more part."""

    def __init__(self):
        self.ks, self.vs = [], []

    def get(self):
        return (torch.cat(self.ks, 1), torch.cat(self.vs, 1)) if self.ks else (None, None)

    def set(self, k, v):
        self.ks, self.vs = [k], [v]

    def update(self, k, v):
        self.ks.append(k)
        self.vs.append(v)
        return self.get()


class Counted(InAttributes):
    """A number says how much there is."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def update(self, k, v):
        self.seen += k.shape[1]
        k, v = super().update(k, v)
        return k, v * (self.seen > 0)


CACHES = {kind.__name__: kind for kind in (InAttributes, InTuple, InDictionary, InList, Appended, Counted)}


class Own(Layers):
    """The model holds the caches, in plain objects."""

    def __init__(self, kind):
        super().__init__()
        self.caches = [kind() for _ in range(2)]

    def forward(self, x):
        return super().forward(x, self.caches)


def _both(make):
    def change(caches, model, x):
        for cache in caches:
            cache.set(*map(make, cache.get()))

    return change


def _double(caches, model, x):
    model.double()
    _both(torch.Tensor.double)(caches, model, x)


def _one_for_both(caches, model, x):
    k, _ = caches[0].get()
    caches[0].set(k, k)


def _of_other_layer(caches, model, x):
    caches[1].set(*caches[0].get())


def _the_input(caches, model, x):
    caches[0].set(x, x.clone())


def _parts_of_one(caches, model, x):
    whole = torch.stack(caches[0].get())
    caches[0].set(whole[0], whole[1])


def _uneven(caches, model, x):
    k, v = caches[0].get()
    caches[0].set(k[:, 1:].clone(), v[:, 1:].clone())


def _none(caches, model, x):
    for cache in caches:
        cache.__init__()


CHANGES = {
    "nothing": lambda caches, model, x: None,
    "its values": _both(lambda t: t.fill_(0.5)),
    "cut": _both(lambda t: t[:, :2].clone()),
    "cut, a view": _both(lambda t: t[:, 1:3]),
    "one long": _both(lambda t: t[:, :1].clone()),
    "much longer": _both(lambda t: torch.cat([t] * 40, 1)),
    "rows in another order": _both(lambda t: t[[1, 0]]),
    "other strides": _both(lambda t: t.transpose(0, 2).contiguous().transpose(0, 2)),
    "a step of two": _both(lambda t: torch.stack([t, t], 1).flatten(0, 1)[::2]),
    "expanded": _both(lambda t: t[:1].expand(2, -1, -1)),
    "empty": _both(lambda t: t[:, :0].clone()),
    "requires a gradient": _both(lambda t: t.clone().requires_grad_()),
    "a parameter": _both(nn.Parameter),
    "another dtype": _double,
    "another length in each layer": _uneven,
    "one tensor for both": _one_for_both,
    "parts of one tensor": _parts_of_one,
    "that of another layer": _of_other_layer,
    "the input": _the_input,
    "none": _none,
    "fewer dimensions": _both(lambda t: t[0]),
    "no tensor": _both(lambda t: 5),
    "a gradient mode": lambda caches, model, x: torch.set_grad_enabled(True),
}


def run(kind, how, change, wrap):
    """Results and caches of two requests of five calls, with a change in the middle of the second: those in eager, and those of what ``wrap`` makes of the model, up to an error."""
    found = []
    for compiles in (lambda f: f, wrap):
        torch.manual_seed(0)
        model = Own(CACHES[kind]) if how == "own" else Layers()
        called, results = compiles(model), []
        for request in range(2):
            caches = [CACHES[kind]() for _ in range(2)]
            if how == "own":
                model.caches[:] = caches
            for step in range(5):
                x = torch.full(
                    (2, 2 + request if step == 0 else 1, 4), 0.1 + step, dtype=model.layers[0].q.weight.dtype
                )
                with torch.set_grad_enabled(torch.is_grad_enabled()):
                    if (request, step) == (1, 2):
                        CHANGES[change](caches, model, x)
                        x = x.to(model.layers[0].q.weight.dtype)
                    try:
                        result = called(x) if how == "own" else called(x, caches)
                    except (RuntimeError, TypeError):
                        results.append(["raised"])
                        break
                states = [part for cache in caches for part in cache.get()]
                results.append([value.detach().clone() for value in (result, *states)])
                results[-1].append([value.requires_grad for value in (result, *states)])
                places = [value.data_ptr() for value in (result, x, *states)]
                results[-1].append([[a == b for a in places] for b in places])
        found.append(results)
    return found


def differ(wanted, result):
    """Which calls differ."""
    return [
        i
        for i, (left, right) in enumerate(zip(wanted, result, strict=True))
        if len(left) != len(right)
        or not all(
            torch.allclose(a, b, atol=1e-6) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b
            for a, b in zip(left, right, strict=True)
        )
    ]
