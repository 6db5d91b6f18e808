"""Tensors that are known to be unchanged, without reading them.

``.data``, NumPy and other processes write to a tensor without a trace in its version counter. But torch can share memory lazily: of two tensors that do, the
one that is written to moves to memory of its own first, whoever asks for a pointer to write to. So a lazy copy is kept of each tensor, and as long as the
tensor is where it was, nothing has written to it. Reading through a pointer that might be written to moves a tensor, too: then bits are compared.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fxpasses.plans._torch import storage_address
from fxpasses.tuning import _torch

_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Unchanged:
    """Remembers what some of a program's inputs are, and tells whether they still are.

    Args:
        indices: which ones; their elements lie in the memory of the CPU without gaps.
        inputs: the inputs of a program.
    """

    def __init__(self, indices: Sequence[int], inputs: Sequence[Any]) -> None:
        self._copies: dict[int, Tensor] = {}
        self._compared: list[int] = []
        self._calls = self._until = 1
        self._watch(indices, inputs)

    def hold(self, inputs: Sequence[Any]) -> bool:
        """Whether all of them are as they were, bit by bit. Args: those of the program."""
        if not all(self._is_same(i, inputs[i]) for i in self._compared):
            return False
        return self._places(inputs) == self._known or self._hold_elsewhere(inputs)

    def _watch(self, indices: Sequence[int], inputs: Sequence[Any]) -> None:
        """From now on, know by where they are that these are unchanged; compare those of which there is no lazy copy."""
        watched = []
        for i in indices:
            copy = _torch.lazy_copy(inputs[i])
            if copy is not None:
                watched.append(i)
                self._copies[i] = copy
            else:
                self._compared.append(i)
                self._copies.setdefault(i, inputs[i].detach().clone())
        self._watched = watched
        self._known = self._places(inputs)

    def _places(self, inputs: Sequence[Any]) -> tuple[list[int], list[Any]]:
        picked = [inputs[i] for i in self._watched]
        return list(map(storage_address, picked)), [value.storage_offset() for value in picked]

    def _hold_elsewhere(self, inputs: Sequence[Any]) -> bool:
        """The same for tensors of which some were moved: they are compared, and after twice as many calls each time watched again."""
        if not all(self._is_same(i, inputs[i]) for i in self._watched):
            return False
        self._calls += 1
        if self._calls >= self._until:
            self._calls, self._until = 0, 2 * self._until
            self._watch(self._watched, inputs)
        return True

    def _is_same(self, i: int, value: Tensor) -> bool:
        copy = self._copies[i]
        size = copy.numel() * copy.element_size()
        if value.untyped_storage().nbytes() < size:
            return False
        return not _compare(_torch.element_address(value), _torch.element_address(copy), size)
