"""Variations of a sample call: other sizes, numbers, flags, layouts, dtypes, ranks and data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch

from fake.library.opcheck.sample_calls import Call, refill, restride, reversed_values

Change = Callable[[torch.Tensor], torch.Tensor]
_PRIMES = (5, 7, 11, 13, 17, 19)
_DTYPES = (
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.complex64,
    torch.bool,
)


def changed(call: Call, change: Change, kind: str = "", only: torch.Tensor | None = None) -> Call:
    """Return the call with every strided tensor (or only ``only``) changed, as far as that is possible.

    Args:
        call: the call.
        change: returns the replacement of a tensor; if it fails, the tensor stays as it is.
        kind: the kind of variation.
        only: the tensor to change; None for all.
    """

    def one(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or (only is not None and tensor is not only):
            return tensor
        try:
            return change(tensor)
        except (RuntimeError, NotImplementedError):
            return tensor  # a dtype with few operators

    return call.map(one, kind=kind)


def _alternating(tensor: torch.Tensor) -> torch.Tensor:
    out = tensor.clone(memory_format=torch.contiguous_format)
    out.view(-1)[::2] = 0
    return out


#: Changes of values that preserve everything a fake kernel may read.
DATA_CHANGES: tuple[Change, ...] = (torch.zeros_like, torch.ones_like, reversed_values, _alternating)


def variations(sample: Call) -> Iterator[Call]:
    """Yield calls of all kinds in turn, so that a small budget covers each kind."""
    kinds = (_sizes, _flags, _numbers, _layouts, _shapes, _dtypes, _ranks)
    for turn in itertools.zip_longest(*(kind(sample) for kind in kinds)):
        yield from (variation for variation in turn if variation is not None)


def _first_tensors(sample: Call, count: int) -> list[torch.Tensor]:
    """Return the first tensors of a call that has more than one."""
    tensors = [t for t in sample.tensors if t.layout is torch.strided]
    return tensors[:count] if len(tensors) > 1 else []


def _resize(sample: Call, change: Callable[[tuple[int, int], int], int]) -> Call:
    """Resize every tensor by ``change((tensor number, dimension), size)``."""
    count = itertools.count()

    def one(tensor: torch.Tensor) -> torch.Tensor:
        number = next(count)
        shape = [change((number, i), s) for i, s in enumerate(tensor.shape)]
        return tensor if shape == list(tensor.shape) else refill(tensor, shape)

    return changed(sample, one, "size")


def _replace_size(old: int, new: int, place: tuple[int, int], size: int) -> int:
    return new if size == old else size


def _set_size(where: tuple[int, int], new: int, place: tuple[int, int], size: int) -> int:
    return new if place == where else size


def _sizes(sample: Call) -> Iterator[Call]:
    tensors = [t for t in sample.tensors if t.layout is torch.strided]
    distinct = sorted({s for t in tensors for s in t.shape})
    larger = {s: s + _PRIMES[i % len(_PRIMES)] for i, s in enumerate(distinct)}
    if distinct:
        yield _resize(sample, lambda place, size: larger[size])
        yield _resize(sample, lambda place, size: 2 * size)
    for size in distinct:
        for new in (larger[size], size + 1, 1, 0):
            if new != size:
                yield _resize(sample, partial(_replace_size, size, new))
    places = [(n, i) for n, t in enumerate(tensors) for i in range(t.dim())][:10]
    for place in places:
        for new in (6, 1, 3):
            yield _resize(sample, partial(_set_size, place, new))


def _numbers(sample: Call) -> Iterator[Call]:
    for place, leaf in enumerate(sample.leaves):
        if isinstance(leaf, bool) or not isinstance(leaf, (int, float)):
            continue
        changes = (leaf + 1, leaf - 1, 0, -1, 1, 2) if isinstance(leaf, int) else (leaf * 0.5, leaf + 1.0)
        for value in dict.fromkeys(changes):
            if value != leaf:
                yield sample.replace_leaves({place: value}, kind="number")


def _flags(sample: Call) -> Iterator[Call]:
    for place, leaf in enumerate(sample.leaves):
        if isinstance(leaf, bool):
            yield sample.replace_leaves({place: not leaf}, kind="flag")


def _layouts(sample: Call) -> Iterator[Call]:
    yield changed(sample, partial(restride, kind="channels last"), "layout")
    for kind in ("column-major", "with gaps"):
        change = partial(restride, kind=kind)
        yield changed(sample, change, "layout")
        for tensor in _first_tensors(sample, 3):
            yield changed(sample, change, "layout", only=tensor)


def _dtypes(sample: Call) -> Iterator[Call]:
    def cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    for dtype in _DTYPES:
        yield changed(sample, partial(cast, dtype), "dtype")
        for tensor in _first_tensors(sample, 2):
            yield changed(sample, partial(torch.Tensor.to, dtype=dtype), "dtype", only=tensor)


def _shapes(sample: Call) -> Iterator[Call]:
    """Give tensors the shape of another one, or fewer or more broadcast dimensions."""
    tensors = _first_tensors(sample, 4)
    for one, other in itertools.permutations(tensors, 2):
        if one.shape != other.shape:
            yield changed(sample, partial(refill, shape=list(other.shape)), "shape", only=one)
    for one in tensors:
        yield changed(sample, lambda t: t.unsqueeze(0), "shape", only=one)
        yield changed(sample, lambda t: t.expand(4, 3, *t.shape).contiguous(), "shape", only=one)
        yield changed(sample, partial(refill, shape=[]), "shape", only=one)


def _one_more(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(0).repeat(3, *[1] * tensor.dim())


def _one_less(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[0].clone() if tensor.dim() and tensor.shape[0] else tensor


def _ranks(sample: Call) -> Iterator[Call]:
    for only in (None, *_first_tensors(sample, 3)):
        yield changed(sample, _one_more, "rank", only)
        yield changed(sample, _one_less, "rank", only)
