"""Interned metadata of fake tensors: tensors that an operator cannot tell apart share one object.

Identity is equality, so cache keys compare by pointer. The table holds its entries weakly: metadata lives as
long as a tensor, a cache key or a recipe that uses it.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch


class TensorMetadata:
    """Everything about one strided tensor that decides an operator's answer,
    except storage size and ``requires_grad``.

    Those two change without the tensor noticing (a view's storage is resized through its base, autograd sets
    ``requires_grad`` after the operator returned), so keys read them from the tensor where they matter.

    Attributes:
        shape: sizes.
        stride: strides, in elements.
        dtype: element type.
        device: the device that the fake tensor stands for.
        offset: storage offset, in elements.
        flags: bit 0 conjugate, bit 1 negative, bit 2 inference tensor, bit 3 zero tensor.
    """

    __slots__ = ("__weakref__", "device", "dtype", "flags", "offset", "shape", "stride")

    shape: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    offset: Any
    flags: int

    def fields(self) -> tuple[Any, ...]:
        """Return the six values, in the order in which the table takes them."""
        return (self.shape, self.stride, self.dtype, self.device, self.offset, self.flags)

    def to_keep(self) -> TensorMetadata | None:
        """Return itself if a tensor may cache it, else None: a complex tensor's conjugate bit can change."""
        return None if self.dtype.is_complex else self

    def __repr__(self) -> str:
        return (
            f"TensorMetadata(shape={self.shape}, stride={self.stride}, dtype={self.dtype}, device={self.device}, "
            f"offset={self.offset}, flags={self.flags})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (intern, self.fields())

    def __copy__(self) -> TensorMetadata:
        return self

    def __deepcopy__(self, memo: dict) -> TensorMetadata:
        return self


class MetadataTable:
    """Owns interned metadata; thread-safe.

    Args:
        kind: the class of its objects.
    """

    def __init__(self, kind: type[TensorMetadata] = TensorMetadata) -> None:
        self._kind = kind
        self._lock = threading.Lock()
        self._entries: weakref.WeakValueDictionary[tuple[Any, ...], TensorMetadata] = (
            weakref.WeakValueDictionary()
        )

    def intern(
        self,
        shape: tuple[Any, ...],
        stride: tuple[Any, ...],
        dtype: torch.dtype,
        device: torch.device,
        offset: Any,
        flags: int = 0,
    ) -> TensorMetadata:
        """Return the unique object for these values (sizes are hashable numbers).

        Args:
            shape: sizes.
            stride: strides in elements.
            dtype: the tensor's dtype.
            device: its device.
            offset: its storage offset in elements.
            flags: bits, see `TensorMetadata`.
        """
        key = (shape, stride, dtype, device, offset, flags)
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                found = self._kind()
                found.shape, found.stride, found.dtype, found.device, found.offset, found.flags = key
                self._entries[key] = found
            return found

    def __len__(self) -> int:
        return len(self._entries)


STATIC = MetadataTable()
"""Metadata with plain integer sizes, shared by all modes of the process."""


def intern(*values: Any) -> TensorMetadata:
    """Call :meth:`MetadataTable.intern` of that table, under a name that entries on disk can refer to."""
    return STATIC.intern(*values)
