"""Track which numbers of a result *are* numbers of the arguments: the same node,
not just an equal expression.

``make_fx`` looks up a symbolic size by its node, and reads it where it first met that node. That determines
which sizes are saved for the backward pass, and which tensor each is read from. So a graph traced with the
cache equals that of a real dispatch only if each number of a result has the node that a dispatch would give
it: one of an argument, or a new one.

:func:`with_links` records this for a dispatch. If arguments shared a node then, all origins are recorded: a
call in which these hold different nodes is not served (:class:`AmbiguousNode`), and its dispatch shows which
of the origins it is (:func:`merge_links`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fake.cache.recipe import BUILDERS, Fresh, Mark, Path, Rebuild, Sequence, View, build, follow
from fake.cache.symbolic import SymbolicMetadata
from fake.cache.symbolic_recipe import (
    Stale,
    StalenessCheck,
    SymbolicConstant,
    empty_storage,
    inference_context,
)
from fake.seam import proxy_tensor
from fake.seam.dispatch import variable_functions
from fake.seam.fake_tensor import FakeTensor as TorchFakeTensor
from fake.tensors.tensor import Unkeyable, make_fake, plain_of

SIZE, STRIDE, OFFSET, NUMBER = range(4)
Origin = tuple[Path, int, int]
"""Where a number of an argument is: the argument, one of the kinds above, and the index."""

Link = int | tuple[Origin, ...]
"""A new node (equal integers mean the same node), or the origins where dispatches have seen the number's
node; empty if they differ between calls."""


class AmbiguousNode(Exception):
    """The arguments do not determine which of their nodes a result has."""


@dataclass(frozen=True)
class Linked:
    """A recipe with a link for each number of its outputs, in the order of :func:`_numbers`;
    None for plain integers."""

    recipe: Any
    links: tuple[Link | None, ...]


def with_links(recipe: Any, args: Any, kwargs: Any, outputs: Any) -> Any:
    """Add the origins of the nodes of ``outputs`` to their recipe;
    unchanged if there are no symbolic numbers.

    Args:
        recipe: how to rebuild ``outputs``.
        args: the call's positional arguments.
        kwargs: its keyword arguments.
        outputs: what the dispatch returned.
    """
    nodes = [getattr(number, "node", None) for number in _numbers(recipe, outputs)]
    if not any(nodes):
        return recipe
    origins: dict[int, list[Origin]] = {}
    for origin, number in _symints_of_arguments(args, kwargs):
        origins.setdefault(id(number.node), []).append(origin)
    new: dict[int, int] = {}
    links: list[Link | None] = []
    for node in nodes:
        found = origins.get(id(node))
        links.append(
            None if node is None else new.setdefault(id(node), len(new)) if found is None else tuple(found)
        )
    return Linked(recipe, tuple(links))


def merge_links(old: Any, new: Any) -> Any:
    """Combine the recipes of two dispatches of equal calls:
    the links keep the origins that both have seen."""
    if not isinstance(old, Linked) or not isinstance(new, Linked) or old.recipe != new.recipe:
        return new
    return Linked(new.recipe, tuple(map(_common_origins, old.links, new.links)))


def _common_origins(old: Link | None, new: Link | None) -> Link | None:
    if not isinstance(old, tuple) or not isinstance(new, tuple):
        return new if old == new else ()
    return tuple([origin for origin in new if origin in old])


def _numbers(recipe: Any, output: Any) -> Iterator[Any]:
    """Yield sizes, strides and offsets of the tensors that a recipe describes in an output,
    and its other numbers."""
    if isinstance(recipe, Sequence):
        for item, part in zip(recipe.items, output, strict=True):
            yield from _numbers(item, part)
    elif isinstance(recipe, SymbolicConstant):
        yield output
    elif isinstance(recipe, (Fresh, View)):
        yield from (*output.shape, *output.stride(), output.storage_offset())


def _symints_of_arguments(args: Any, kwargs: Any) -> Iterator[tuple[Origin, torch.SymInt]]:
    """Yield the symbolic numbers of the arguments with their origins."""

    def visit(path: Path, value: Any) -> Iterator[tuple[Origin, torch.SymInt]]:
        if isinstance(value, torch.SymInt):
            yield (path, NUMBER, 0), value
        elif isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                for kind in (SIZE, STRIDE, OFFSET):
                    for index, number in enumerate(_READERS[kind](value)):
                        if isinstance(number, torch.SymInt):
                            yield (path, kind, index), number
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                yield from visit((*path, index), item)

    for index, value in enumerate(args):
        yield from visit((index,), value)
    for name, value in kwargs.items():
        yield from visit((name,), value)


_READERS: dict[int, Callable[[Any], Any]] = {
    SIZE: lambda tensor: tensor.shape,
    STRIDE: torch.Tensor.stride,
    OFFSET: lambda tensor: (tensor.storage_offset(),),
    NUMBER: lambda number: (number,),
}


def _build_linked(recipe: Linked, tensor_class: type, mark: Mark) -> Rebuild:
    """Build from patterns, whose nodes outputs share;
    with the nodes of a dispatch if these may be observed."""
    without_links = build(recipe.recipe, tensor_class, mark)
    exact: Rebuild | None = None
    # What torch's own mode makes outside of a trace may be an input of a later one, in AOTAutograd.
    always, nodes_are_observable = tensor_class is TorchFakeTensor, proxy_tensor.nodes_are_observable

    def rebuild(mode: Any, args: Any, kwargs: Any) -> Any:
        """Return the outputs of a call. Args: the mode, and the operator's arguments. Raises ``Stale`` if a
        symbol was replaced."""
        nonlocal exact
        if not (always or nodes_are_observable()):
            return without_links(mode, args, kwargs)
        if exact is None:
            try:
                exact = _build_exact(recipe, tensor_class, mark)
            except Unkeyable:  # a symbol was replaced since the entry was made
                raise Stale from None
        return exact(mode, args, kwargs)

    return rebuild


def _build_exact(recipe: Linked, tensor_class: type, mark: Mark) -> Rebuild:
    read: dict[tuple[Path, int], int] = {}
    origins: list[Any] = []
    for link in recipe.links:
        if isinstance(link, tuple):
            origins.append([(read.setdefault((path, kind), len(read)), index) for path, kind, index in link])
        else:
            origins.append(link)
    reads = [(path, _READERS[kind]) for path, kind in read]
    make = _maker(recipe.recipe, iter(origins), tensor_class, mark)

    return lambda mode, args, kwargs: make(
        mode, args, kwargs, [reader(follow(path, args, kwargs)) for path, reader in reads], {}
    )


def _maker(recipe: Any, origins: Iterator[Any], tensor_class: type, mark: Mark) -> Callable[..., Any]:
    """Return ``make(mode, args, kwargs, read_numbers, new_numbers)`` for one output;
    consumes its origins from the iterator."""
    if isinstance(recipe, Sequence):
        parts = [_maker(item, origins, tensor_class, mark) for item in recipe.items]
        kind = recipe.type
        return lambda mode, args, kwargs, read_numbers, new_numbers: kind(
            [part(mode, args, kwargs, read_numbers, new_numbers) for part in parts]
        )
    if isinstance(recipe, (Fresh, View)):
        return _maker_of_tensor(recipe, origins, tensor_class, mark)
    if isinstance(recipe, SymbolicConstant):
        return _maker_of_number(recipe, origins)
    plain = build(recipe, tensor_class, mark)
    return lambda mode, args, kwargs, read_numbers, new_numbers: plain(mode, args, kwargs)


def _maker_of_number(recipe: SymbolicConstant, origins: Iterator[Any]) -> Callable[..., Any]:
    staleness, number = StalenessCheck(recipe.value), _number(recipe.value, next(origins))

    def make(mode: Any, args: Any, kwargs: Any, read_numbers: Any, new_numbers: Any) -> Any:
        """Return the number. Args: mode and arguments of a call, the numbers read from these,
        the nodes made so far."""
        staleness.check()
        return number(read_numbers, new_numbers)

    return make


def _maker_of_tensor(
    recipe: Fresh | View, origins: Iterator[Any], tensor_class: type, mark: Mark
) -> Callable[..., Any]:
    metadata: Any = recipe.metadata
    shape = [_number(token, next(origins)) for token in metadata.shape]
    stride = [_number(token, next(origins)) for token in metadata.stride]
    offset = _number(metadata.offset, next(origins))
    if type(metadata) is not SymbolicMetadata:
        plain = build(recipe, tensor_class, mark)
        return lambda mode, args, kwargs, read_numbers, new_numbers: plain(mode, args, kwargs)
    staleness = StalenessCheck(metadata)
    device, kept, path = metadata.device, metadata.to_keep(), getattr(recipe, "path", None)
    storage: Any = None

    def make(mode: Any, args: Any, kwargs: Any, read_numbers: Any, new_numbers: Any) -> Any:
        """Return the tensor. Args: mode and arguments of a call, the numbers read from these,
        the nodes made so far."""
        nonlocal storage
        staleness.check()
        sizes = [number(read_numbers, new_numbers) for number in shape]
        strides = [number(read_numbers, new_numbers) for number in stride]
        start = offset(read_numbers, new_numbers)
        if path is not None:
            element = plain_of(follow(path, args, kwargs)).as_strided(sizes, strides, start)
            return make_fake(element, device, mode, kept, mark, tensor_class)
        if storage is None:
            assert isinstance(recipe, Fresh)
            storage = empty_storage(recipe)
        with inference_context(metadata):
            element = variable_functions._lazy_clone(storage).as_strided(sizes, strides, start)
        return make_fake(element, device, mode, kept, mark, tensor_class)

    return make


def _number(token: Any, link: Any) -> Callable[[Any, Any], Any]:
    """Return a function that gives a number of an output,
    from the numbers read from arguments and the call's new ones."""
    if type(token) is int:
        return lambda read_numbers, new_numbers: token
    if isinstance(link, int):

        def new(read_numbers: Any, new_numbers: Any) -> Any:
            number = new_numbers.get(link)
            if number is None:
                number = new_numbers[link] = token.symbol()
            return number

        return new

    def same(read_numbers: Any, new_numbers: Any) -> Any:
        if not link:
            raise AmbiguousNode
        (row, index), *others = link
        number = read_numbers[row][index]
        for other_row, other_index in others:
            if getattr(read_numbers[other_row][other_index], "node", None) is not number.node:
                raise AmbiguousNode
        return number

    return same


BUILDERS[Linked] = _build_linked
