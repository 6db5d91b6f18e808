"""What is symbolic in a key, up to the names of the symbols: a *pattern*, and the symbols in the order of the pattern.

``[s3, 4*s3*s1]`` and ``[s7, 4*s7*s9]`` have one pattern. It is found once for each metadata object and each size of an
environment; the key of a call is put together from patterns and from which of their symbols are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fake.cache.expressions import Encoded, encode
from fake.cache.symbolic import SizeToken, SymbolicMetadata
from fake.tensors.metadata import MetadataTable, TensorMetadata


class NormalizedMetadata(TensorMetadata):
    """Metadata with encoded sizes, interned: identity is equality, as everywhere in keys."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return (intern_normalized, self.fields())


_NORMALIZED = MetadataTable(NormalizedMetadata)


def intern_normalized(
    shape: tuple[Encoded, ...],
    stride: tuple[Encoded, ...],
    dtype: torch.dtype,
    device: torch.device,
    offset: Encoded,
    flags: int,
) -> NormalizedMetadata:
    """The one object of the process for these values.

    Args:
        shape: sizes, each an integer or an encoded expression.
        stride: strides in elements, likewise.
        dtype: the tensor's dtype.
        device: its device.
        offset: its storage offset in elements, encoded likewise.
        flags: see ``fake.tensors.metadata``.
    """
    found: Any = _NORMALIZED.intern(shape, stride, dtype, device, offset, flags)
    return found


def normalized_metadata(metadata: SymbolicMetadata, number_of: Callable[[Any], int]) -> NormalizedMetadata:
    """Metadata with its sizes encoded.

    Raises:
        Unkeyable: an expression has no such form.
    """

    def encoded(value: Any) -> Encoded:
        return value if value.__class__ is int else encode(value.expr, number_of)

    return intern_normalized(
        tuple([encoded(size) for size in metadata.shape]),
        tuple([encoded(size) for size in metadata.stride]),
        metadata.dtype,
        metadata.device,
        encoded(metadata.offset),
        metadata.flags,
    )


def pattern_of(owner: SymbolicMetadata | SizeToken) -> tuple[Any, tuple[Any, ...]]:
    """The pattern of metadata or of a size, and its symbols in the order in which the pattern numbers them.

    Raises:
        Unkeyable: an expression has no such form.
    """
    found = owner.pattern
    if found is None:
        numbers: dict[Any, int] = {}

        def number_of(symbol: Any) -> int:
            return numbers.setdefault(symbol, len(numbers))

        pattern: Any
        if owner.__class__ is SizeToken:
            pattern = ("size", encode(owner.expr, number_of))
        else:
            pattern = normalized_metadata(owner, number_of)  # type: ignore[arg-type]
        found = owner.pattern = (pattern, tuple(numbers))
    return found
