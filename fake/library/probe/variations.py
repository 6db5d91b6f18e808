"""Variations of a sample call: other sizes, numbers, flags, layouts, dtypes, ranks and data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from fake.library.opcheck.inputs import flat_tensors, refill, restride
from fake.seam import library as _torch

pytree = _torch.pytree
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
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


def change_tensors(arguments: Arguments, change: Change, only: torch.Tensor | None = None) -> Arguments:
    """The arguments with every strided tensor (or ``only`` one) changed; what cannot be changed stays.

    Args:
        arguments: positional and keyword arguments.
        change: gives the tensor that replaces one; a failure leaves it as it is.
        only: the tensor that is changed; None for all.
    """
    done: dict[int, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or (only is not None and tensor is not only):
            return tensor
        if id(tensor) not in done:
            try:
                done[id(tensor)] = change(tensor)
            except (RuntimeError, NotImplementedError):
                done[id(tensor)] = tensor  # a dtype that can do little
        return done[id(tensor)]

    args, kwargs = pytree.tree_map_only(torch.Tensor, once, arguments)
    return tuple(args), kwargs


def copy_arguments(arguments: Arguments) -> Arguments:
    """The same values and strides in fresh memory."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_contiguous():
            return tensor.clone()
        if tensor.numel() == 0 or 0 in tensor.stride():
            return tensor.detach()
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)

    return change_tensors(arguments, copy)


def _reversed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().flip(0).reshape(tensor.shape)


def _alternating(tensor: torch.Tensor) -> torch.Tensor:
    out = tensor.clone(memory_format=torch.contiguous_format)
    out.view(-1)[::2] = 0
    return out


#: Changes of values that keep everything a fake kernel may look at.
DATA_CHANGES: tuple[Change, ...] = (torch.zeros_like, torch.ones_like, _reversed, _alternating)


def variations(sample: Arguments) -> Iterator[tuple[str, Arguments]]:
    """``(label, arguments)``, taking turns between the kinds, so that a small budget has some of each."""
    kinds = (_sizes, _flags, _numbers, _layouts, _shapes, _dtypes, _ranks)
    for turn in itertools.zip_longest(*(kind(sample) for kind in kinds)):
        yield from (variation for variation in turn if variation is not None)


def _several(sample: Arguments, count: int) -> list[torch.Tensor]:
    """The first tensors of a call that has more than one."""
    tensors = [t for t in flat_tensors(sample) if t.layout is torch.strided]
    return tensors[:count] if len(tensors) > 1 else []


def _resize(sample: Arguments, change: Callable[[tuple[int, int], int], int]) -> Arguments:
    """Every tensor with ``change((tensor number, dimension), size)`` as sizes."""
    count = itertools.count()

    def one(tensor: torch.Tensor) -> torch.Tensor:
        number = next(count)
        shape = [change((number, i), s) for i, s in enumerate(tensor.shape)]
        return tensor if shape == list(tensor.shape) else refill(tensor, shape)

    return change_tensors(sample, one)


def _rename(old: int, new: int, place: tuple[int, int], size: int) -> int:
    return new if size == old else size


def _set(where: tuple[int, int], new: int, place: tuple[int, int], size: int) -> int:
    return new if place == where else size


def _sizes(sample: Arguments) -> Iterator[tuple[str, Arguments]]:
    tensors = [t for t in flat_tensors(sample) if t.layout is torch.strided]
    distinct = sorted({s for t in tensors for s in t.shape})
    larger = {s: s + _PRIMES[i % len(_PRIMES)] for i, s in enumerate(distinct)}
    if distinct:
        yield "size: all", _resize(sample, lambda place, size: larger[size])
        yield "size: doubled", _resize(sample, lambda place, size: 2 * size)
    for size in distinct:
        for new in (larger[size], size + 1, 1, 0):
            if new != size:
                yield f"size {size} to {new}", _resize(sample, partial(_rename, size, new))
    places = [(n, i) for n, t in enumerate(tensors) for i in range(t.dim())][:10]
    for place in places:
        for new in (6, 1, 3):
            yield f"size of {place}", _resize(sample, partial(_set, place, new))


def _replace_leaf(arguments: Arguments, place: int, value: Any) -> Arguments:
    leaves, spec = pytree.tree_flatten(arguments)
    leaves[place] = value
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return tuple(args), kwargs


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
    yield "layout: channels last", change_tensors(sample, partial(restride, kind="channels last"))
    for kind in ("column-major", "with gaps"):
        change = partial(restride, kind=kind)
        yield f"layout: {kind}", change_tensors(sample, change)
        for tensor in _several(sample, 3):
            yield f"layout: {kind}", change_tensors(sample, change, only=tensor)


def _dtypes(sample: Arguments) -> Iterator[tuple[str, Arguments]]:
    def cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    for dtype in _DTYPES:
        yield f"dtype {dtype}", change_tensors(sample, partial(cast, dtype))
        for tensor in _several(sample, 2):
            yield f"dtype {dtype}", change_tensors(sample, partial(torch.Tensor.to, dtype=dtype), only=tensor)


def _shapes(sample: Arguments) -> Iterator[tuple[str, Arguments]]:
    """Tensors that take the shape of another, or fewer or more broadcast dimensions."""
    tensors = _several(sample, 4)
    for one, other in itertools.permutations(tensors, 2):
        if one.shape != other.shape:
            changed = change_tensors(sample, partial(refill, shape=list(other.shape)), only=one)
            yield "shape of another", changed
    for one in tensors:
        yield "shape: leading 1", change_tensors(sample, lambda t: t.unsqueeze(0), only=one)
        yield (
            "shape: two leading",
            change_tensors(sample, lambda t: t.expand(4, 3, *t.shape).contiguous(), only=one),
        )
        yield "shape: scalar", change_tensors(sample, partial(refill, shape=[]), only=one)


def _one_more(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unsqueeze(0).repeat(3, *[1] * tensor.dim())


def _one_less(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[0].clone() if tensor.dim() and tensor.shape[0] else tensor


def _ranks(sample: Arguments) -> Iterator[tuple[str, Arguments]]:
    yield "rank: one more", change_tensors(sample, _one_more)
    yield "rank: one less", change_tensors(sample, _one_less)
    for tensor in _several(sample, 3):
        yield "rank: one more", change_tensors(sample, _one_more, only=tensor)
        yield "rank: one less", change_tensors(sample, _one_less, only=tensor)
