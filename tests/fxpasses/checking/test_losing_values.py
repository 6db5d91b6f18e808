"""What a coarser type rounds to the other side of a number that is compared is found, wherever that type is; what compares as before is not."""

import pytest
import torch

import fxpasses
from fxpasses.checking.comparison.values import Reference, precision_losses, value_names
from fxpasses.checking.critical.critical_values import at_critical_values

X, Y = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
EDGES = torch.tensor([-1.3, -0.2, 0.45, 1.1])
TYPES = [torch.float16, torch.bfloat16]


def lost(before, after, *inputs):
    """What digits are lost where a window compares."""
    first, second = (fxpasses.capture(f, *inputs).forward for f in (before, after))
    found = at_critical_values(Reference(first, inputs).rewriting(second))
    return [
        m
        for at in found
        for m in precision_losses(
            Reference(at.before, at.inputs).rewriting(at.after), value_names(at.before, "inference")
        )
    ]


COMPARING = {
    "a number": (lambda x, y, n: (n(x) > 0.7) & (y > 0), X, Y),
    "a number, and equal": (lambda x, y, n: torch.where(n(x * 2) >= 0.3, y, 0.0), X, Y),
    "another value": (lambda x, y, n: n(x).to(y) < y, X, Y),
    "boundaries": (lambda x, y, n: torch.bucketize(n(x).float(), y), X, EDGES),
    "the largest": (lambda x, y, n: n(x + 1).argmax(-1) + y.argmax(-1), X, Y),
    "two largest": (lambda x, y, n: n(x).topk(2, -1)[1] * 2 + y.argmax(), X, Y),
    "an order": (lambda x, y, n: n(x).argsort(-1), X, Y),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", COMPARING)
def test_a_coarser_type_in_front_of_a_comparison(name, dtype):
    comparing, *inputs = COMPARING[name]
    given = [lambda x, y, n=n: (comparing(x, y, n), y * 2) for n in (lambda x: x, lambda x: x.to(dtype))]
    assert lost(*given, *inputs)
    assert not lost(given[1], given[0], *inputs)  # another one that is finer


RIGHT = {
    "of what has few digits": (
        lambda x, y, d: (x.to(d) > 0.7) & (y > 0),
        lambda x, y, d: (x.to(d).float() > 0.7) & (y > 0),
    ),
    "turned around": (
        lambda x, y, d: (x * 2 > 0.7) & (y.to(d) > 1.5),
        lambda x, y, d: (x * 4 > 1.4) & (y.to(d) > 1.5),
    ),
    "an order of what is tied": (
        lambda x, y, d: x.to(d).float().argmax(-1) + y.argmax(),
        lambda x, y, d: x.to(d).argmax(-1) + y.argmax(),
    ),
    "beside what has few digits": (
        lambda x, y, d: torch.where(x > y, x, y).to(d),
        lambda x, y, d: torch.maximum(x, y).to(d),
    ),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", RIGHT)
def test_what_compares_as_before_loses_nothing(name, dtype):
    given = [lambda x, y, f=f: (f(x, y, dtype), y * 2) for f in RIGHT[name]]
    assert not lost(*given, X, Y)


VANISHING = {
    "a logarithm beside one": (torch.log1p, lambda y: (y + 1).log()),
    "an exponential without one": (torch.expm1, lambda y: y.exp() - 1),
}
FOLLOWING = {
    "an input": lambda x: x * 3,
    "a square": lambda x: x * x,
    "an exponential": torch.exp,
    "minus an exponential": lambda x: -(x.exp() + 1).reciprocal(),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("where", FOLLOWING)
@pytest.mark.parametrize("name", VANISHING)
def test_nothing_is_left_near_zero(name, where, dtype):
    x = (torch.rand(6, 8, generator=torch.Generator().manual_seed(0)) + 0.5).to(dtype)
    before, after = [lambda x, f=f: f(FOLLOWING[where](x)) for f in VANISHING[name]]
    assert lost(before, after, x)
    assert not lost(after, before, x)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("where", FOLLOWING)
def test_few_digits_that_are_kept_near_zero(where, dtype):
    x = (torch.rand(6, 8, generator=torch.Generator().manual_seed(0)) + 0.5).to(dtype)
    for before, after in [
        (lambda y: (y * 0.5 + 1) * y, lambda y: y * y * 0.5 + y),
        (lambda y: torch.nn.functional.gelu(y), lambda y: y * 0.5 * (1 + (y * 0.5**0.5).erf())),
        (lambda y: y.sin() / (y + 2), lambda y: y.sin() * (y + 2).reciprocal()),
    ]:
        follow = FOLLOWING[where]
        assert not lost(lambda x, f=before, g=follow: f(g(x)), lambda x, f=after, g=follow: f(g(x)), x)
