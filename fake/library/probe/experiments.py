"""Running the kernel: the samples, and chosen variations of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import _torch
from ..opcheck.inputs import flat_tensors, refill, restride
from .facts import Facts, OutputFact, bind, describe_outputs, facts_of

__all__ = ["Laboratory", "Observation"]

pytree = _torch.pytree
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_PRIMES = (5, 7, 11, 13, 17, 19)


@dataclass(frozen=True)
class Observation:
    """One call that the kernel accepted.

    Attributes:
        outputs: None where the result is not made of strided tensors.
        sample: whether it is a sample rather than a variation.
        label: how it varies its sample.
        writes: an argument that the call wrote to, or None.
    """

    facts: Facts
    outputs: tuple[OutputFact, ...] | None
    sample: bool
    label: str
    writes: str | None = None


class Laboratory:
    """Calls an operator and remembers what it did.

    Args:
        op: the real kernel, or the operator with one.
        names: the parameters' names, or None.
        budget: the number of calls to spend on one sample.
    """

    def __init__(self, op: Callable[..., Any], names: Sequence[str] | None, budget: int = 90) -> None:
        self.op = op
        self.names = names
        self.budget = budget
        self.observations: list[Observation] = []
        self.container: type | None = None

    def study(self, sample: Arguments) -> bool:
        """Run a sample and its variations; returns whether the sample itself ran."""
        sample = _detach(sample)
        first = self._run(sample, "sample", sample=True)
        if first is None:
            return False
        first = self._run_with_other_data(sample, first)
        self.observations.append(first)
        for label, arguments in itertools.islice(_variations(sample), self.budget):
            found = self._run(arguments, label, sample=False)
            if found is not None:
                if label.startswith(("size", "flag")):
                    found = self._run_with_other_data(arguments, found)
                self.observations.append(found)
        return True

    def _run(self, arguments: Arguments, label: str, *, sample: bool) -> Observation | None:
        args, kwargs = _copy(arguments)
        bound = bind(self.names, args, kwargs)
        before = [(name, leaf, leaf.clone()) for name, value in bound.items() for leaf in flat_tensors(value)]
        try:
            facts = facts_of(bound)
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                result = self.op(*args, **kwargs)
        except Exception:  # noqa: BLE001  refused inputs say nothing about the outputs
            return None
        if sample:
            self.container = (
                list if isinstance(result, list) else tuple if isinstance(result, tuple) else None
            )
        for name, leaf, copy in before:
            if leaf.layout is torch.strided and leaf.shape == copy.shape and not _equal(leaf, copy):
                return Observation(facts, describe_outputs(result, bound), sample, label, name)
        return Observation(facts, describe_outputs(result, bound), sample, label)

    def _run_with_other_data(self, arguments: Arguments, first: Observation) -> Observation:
        """Sizes that change with the data become None."""
        outputs = first.outputs
        for change in (torch.zeros_like, torch.ones_like, _reversed, _alternating):
            if outputs is None:
                break
            other = self._run(_map(arguments, change), "data", sample=False)
            if other is None or other.outputs is None or len(other.outputs) != len(outputs):
                continue
            merged = []
            for mine, theirs in zip(outputs, other.outputs, strict=True):
                if len(mine.shape) == len(theirs.shape):
                    shape = tuple(
                        a if a == b else None for a, b in zip(mine.shape, theirs.shape, strict=True)
                    )
                    mine = replace(mine, shape=shape)
                merged.append(mine)
            outputs = tuple(merged)
        return replace(first, outputs=outputs)


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool(((left == right) | (left != left)).all())


def _detach(arguments: Arguments) -> Arguments:
    args, kwargs = _map(arguments, lambda t: t.detach())
    return tuple(args), kwargs


def _map(arguments: Arguments, change: Callable[[torch.Tensor], torch.Tensor]) -> Arguments:
    done: dict[int, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            return tensor
        if id(tensor) not in done:
            try:
                done[id(tensor)] = change(tensor)
            except (RuntimeError, NotImplementedError):
                done[id(tensor)] = tensor  # a dtype that can do little: leave it as it is
        return done[id(tensor)]

    args, kwargs = pytree.tree_map_only(torch.Tensor, once, arguments)
    return tuple(args), kwargs


def _copy(arguments: Arguments) -> Arguments:
    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_contiguous():
            return tensor.clone()
        if tensor.numel() == 0 or 0 in tensor.stride():
            return tensor.detach()
        out = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return out.copy_(tensor)

    return _map(arguments, copy)


def _reversed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().flip(0).reshape(tensor.shape)


def _alternating(tensor: torch.Tensor) -> torch.Tensor:
    out = tensor.clone(memory_format=torch.contiguous_format)
    out.view(-1)[::2] = 0
    return out


def _replace_leaf(arguments: Arguments, place: int, value: Any) -> Arguments:
    leaves, spec = pytree.tree_flatten(arguments)
    leaves[place] = value
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return tuple(args), kwargs


def _variations(sample: Arguments) -> Iterator[tuple[str, Arguments]]:
    """Taking turns between the kinds of variation, so that a small budget has some of each."""
    kinds = [
        _sizes(sample), _flags(sample), _numbers(sample), _layouts(sample), _shapes(sample), _dtypes(sample),
        _ranks(sample),
    ]  # fmt: skip
    for turn in itertools.zip_longest(*kinds):
        yield from (variation for variation in turn if variation is not None)


def _resize(sample: Arguments, change: Callable[[int, int, int], int]) -> Arguments:
    """Every tensor with ``change(tensor number, dimension, size)`` as sizes."""
    count = itertools.count()

    def one(tensor: torch.Tensor) -> torch.Tensor:
        number = next(count)
        shape = [change(number, i, s) for i, s in enumerate(tensor.shape)]
        return tensor if shape == list(tensor.shape) else refill(tensor, shape)

    return _map(sample, one)


def _sizes(sample: Arguments) -> Iterator[tuple[str, Arguments]]:
    tensors = [t for t in flat_tensors(sample) if t.layout is torch.strided]
    distinct = sorted({s for t in tensors for s in t.shape})
    bumped = {s: s + _PRIMES[i % len(_PRIMES)] for i, s in enumerate(distinct)}
    if distinct:
        yield "size: all", _resize(sample, lambda n, i, s: bumped[s])
        yield "size: doubled", _resize(sample, lambda n, i, s: 2 * s)
    for size in distinct:
        for new in (bumped[size], size + 1, 1, 0):
            if new != size:
                yield (
                    f"size {size} to {new}",
                    _resize(sample, lambda n, i, s, a=size, b=new: b if s == a else s),
                )
    places = [(n, i) for n, t in enumerate(tensors) for i in range(t.dim())][:10]
    for place in places:
        for new in (6, 1, 3):
            yield f"size of {place}", _resize(sample, lambda n, i, s, p=place, b=new: b if (n, i) == p else s)


def _numbers(sample: Arguments) -> Iterator[tuple[str, Arguments]]:
    leaves, _ = pytree.tree_flatten(sample)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, bool) or not isinstance(leaf, (int, float)):
            continue
        changes = (leaf + 1, leaf - 1, 0, -1, 1, 2) if isinstance(leaf, int) else (leaf * 0.5, leaf + 1.0)
        for value in dict.fromkeys(changes):
            if value != leaf:
                yield f"number {place}", _replace_leaf(sample, place, value)


def _flags(sample: Arguments) -> Iterator[tuple[str, Arguments]]:
    leaves, _ = pytree.tree_flatten(sample)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, bool):
            yield f"flag {place}", _replace_leaf(sample, place, not leaf)


def _layouts(sample: Arguments) -> Iterator[tuple[str, Arguments]]:
    yield "layout: channels last", _map(sample, _channels_last)
    for kind in ("column-major", "with gaps"):
        yield f"layout: {kind}", _map(sample, lambda t, k=kind: restride(t, k))
        tensors = flat_tensors(sample)
        for tensor in tensors[:3] if len(tensors) > 1 else []:
            yield (
                f"layout: {kind}",
                _map(sample, lambda t, one=tensor, k=kind: restride(t, k) if t is one else t),
            )


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.to(memory_format=formats[tensor.dim()]) if tensor.dim() in formats else tensor


def _dtypes(sample: Arguments) -> Iterator[tuple[str, Arguments]]:
    tensors = flat_tensors(sample)
    for dtype in (
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.complex64,
        torch.bool,
    ):
        yield f"dtype {dtype}", _map(sample, lambda t, d=dtype: t.to(d) if t.is_floating_point() else t)
        for tensor in tensors[:2] if len(tensors) > 1 else []:
            yield f"dtype {dtype}", _map(sample, lambda t, one=tensor, d=dtype: t.to(d) if t is one else t)


def _shapes(sample: Arguments) -> Iterator[tuple[str, Arguments]]:
    """Tensors that take the shape of another, or fewer or more broadcast dimensions."""
    tensors = [t for t in flat_tensors(sample) if t.layout is torch.strided][:4]
    for one, other in itertools.permutations(tensors, 2):
        if one.shape != other.shape:
            yield (
                "shape of another",
                _map(sample, lambda t, a=one, b=other: refill(t, list(b.shape)) if t is a else t),
            )
    for one in tensors if len(tensors) > 1 else []:
        yield "shape: leading 1", _map(sample, lambda t, a=one: t.unsqueeze(0) if t is a else t)
        yield (
            "shape: two leading",
            _map(sample, lambda t, a=one: t.expand(4, 3, *t.shape).contiguous() if t is a else t),
        )
        yield "shape: scalar", _map(sample, lambda t, a=one: refill(t, []) if t is a else t)


def _ranks(sample: Arguments) -> Iterator[tuple[str, Arguments]]:
    yield "rank: one more", _map(sample, lambda t: t.unsqueeze(0).repeat(3, *[1] * t.dim()))
    yield "rank: one less", _map(sample, lambda t: t[0].clone() if t.dim() and t.shape[0] else t)
    tensors = flat_tensors(sample)
    for tensor in tensors[:3] if len(tensors) > 1 else []:
        yield (
            "rank: one more",
            _map(sample, lambda t, one=tensor: t.unsqueeze(0).repeat(3, *[1] * t.dim()) if t is one else t),
        )
        yield (
            "rank: one less",
            _map(sample, lambda t, one=tensor: t[0].clone() if t is one and t.dim() and t.shape[0] else t),
        )
