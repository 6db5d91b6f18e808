"""Detects whether tensors are unchanged, without reading them.

``.data``, NumPy and other processes write to a tensor without changing its version counter. But torch can
share memory lazily (copy-on-write): when anything asks for a pointer to write to one of two such tensors,
torch first moves that one to memory of its own. So a lazy copy of each tensor is kept. As long as the tensor
has not moved, nothing has written to it. Reading through a writable pointer moves a tensor as well. In that
case the bits are compared.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fxpasses.plans._torch import storage_address
from fxpasses.tuning import _torch

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class ChangeDetector:
    """Remembers some of a program's inputs, and tells whether they are unchanged.

    Args:
        indices: which inputs. Their elements lie in CPU memory without gaps.
        inputs: the inputs of the program.
    """

    def __init__(self, indices: Sequence[int], inputs: Sequence[Any]) -> None:
        self._copies: dict[int, Tensor] = {}
        self._compared_indices: list[int] = []
        self._calls_since_watch = self._calls_before_watch = 1
        self._watch(indices, inputs)

    def are_unchanged(self, inputs: Sequence[Any]) -> bool:
        """Whether all of them are bitwise unchanged. Args: the inputs of the program."""
        if not all(self._is_bitwise_equal(i, inputs[i]) for i in self._compared_indices):
            return False
        return self._addresses(inputs) == self._known_addresses or self._are_unchanged_after_move(inputs)

    def _watch(self, indices: Sequence[int], inputs: Sequence[Any]) -> None:
        """Detect writes by address from now on. Tensors without a lazy copy are compared instead."""
        watched_indices = []
        for i in indices:
            copy = _torch.lazy_copy(inputs[i])
            if copy is not None:
                watched_indices.append(i)
                self._copies[i] = copy
            else:
                self._compared_indices.append(i)
                self._copies.setdefault(i, inputs[i].detach().clone())
        self._watched_indices = watched_indices
        self._known_addresses = self._addresses(inputs)

    def _addresses(self, inputs: Sequence[Any]) -> tuple[list[int], list[Any]]:
        tensors = [inputs[i] for i in self._watched_indices]
        return list(map(storage_address, tensors)), [value.storage_offset() for value in tensors]

    def _are_unchanged_after_move(self, inputs: Sequence[Any]) -> bool:
        """Like :meth:`are_unchanged`, for tensors of which some have moved: compare them.

        They are watched again after a number of calls that doubles each time.
        """
        if not all(self._is_bitwise_equal(i, inputs[i]) for i in self._watched_indices):
            return False
        self._calls_since_watch += 1
        if self._calls_since_watch >= self._calls_before_watch:
            self._calls_since_watch, self._calls_before_watch = 0, 2 * self._calls_before_watch
            self._watch(self._watched_indices, inputs)
        return True

    def _is_bitwise_equal(self, i: int, value: Tensor) -> bool:
        copy = self._copies[i]
        size = copy.numel() * copy.element_size()
        if value.untyped_storage().nbytes() < size:
            return False
        return not _memcmp(_torch.element_address(value), _torch.element_address(copy), size)
