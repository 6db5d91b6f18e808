"""Checks that tensors are unchanged: class, sizes, strides, dtype and whether they require grad.

Torch's ``TensorGuards`` check each tensor. Between two such checks it is enough that the memory in which
torch keeps the metadata has not changed. The library of :mod:`fxpasses.plans.native` compares it in a tenth
of the time.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxpasses.plans import _torch, native
from fxpasses.plans.tensors.held_views import HeldViews

_pointer = torch.Tensor.data_ptr

log = logging.getLogger(__name__)


class SameTensors:
    """Checks that tensors are unchanged. The state of torch covers which dispatch keys are active."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._guards = _torch.tensor_guards(tensors) if tensors else None
        self._inline = tuple(filter(has_inline_metadata, tensors))
        self._others = [tensor for tensor in tensors if not has_inline_metadata(tensor)]
        self._guards_of_others: Any = _torch.tensor_guards(self._others) if self._others else None
        self._memory: Any = None
        self._views: list[HeldViews] = []

    def allow_view_caching(self, views: HeldViews) -> None:
        """Let ``views`` be cached until the tensors may have moved in memory."""
        if self._inline and memory_library() is not None:
            views.add_weights(self._inline)
            self._views.append(views)

    def hold(self) -> bool:
        """Whether the tensors are unchanged."""
        if self._guards is None:
            return True
        if self._memory is not None and self._memory.holds():
            return not self._others or bool(self._guards_of_others.check(*self._others))
        for views in self._views:
            views.forget()
        library = memory_library() if self._inline else None
        memory = None if library is None else library.Tensors(self._inline, _torch.TENSOR_LAYOUT)
        if not self._guards.check(*self._tensors):
            return False
        self._memory = memory  # taken before the guards passed
        return True


class SameDataPointers:
    """Checks that the memory of these tensors, which have strides, has not moved."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._pointers = list(map(_pointer, tensors))
        self._memory: Any = None

    def hold(self) -> bool:
        """Whether it has not moved."""
        if self._memory is not None and self._memory.holds():
            return True
        library = memory_library()
        memory = None if library is None else library.Tensors(self._tensors, _torch.TENSOR_LAYOUT)
        if list(map(_pointer, self._tensors)) != self._pointers:
            return False
        self._memory = memory  # taken before the pointers were compared
        return True


def has_inline_metadata(tensor: torch.Tensor) -> bool:
    """Whether all checked facts are in the tensor's own memory, and its dispatch keys are the usual ones."""
    return tensor.dim() <= _torch.MAX_INLINE_DIMENSIONS and not tensor.is_conj() and not tensor.is_neg()


def memory_library() -> Any:
    """The library that compares the memory of tensors, or None."""
    library = native.library()
    return library if library is not None and _sees_all_changes(library) else None


@functools.cache
def _sees_all_changes(library: Any) -> bool:
    """Whether every change of a tensor is visible in its memory. Tested once per process."""
    if not _torch.TENSOR_LAYOUT.is_known():
        return False
    for what, change in _CHANGES.items():
        tensor = torch.empty(1000).as_strided((2, 3, 4, 5, 6), (400, 120, 30, 6, 1)).data
        tensor.requires_grad_().requires_grad_(what == "frozen")  # allocates autograd metadata
        memory = library.Tensors((tensor,), _torch.TENSOR_LAYOUT)
        before = memory.holds()
        with torch.no_grad():
            change(tensor)
        if not before or memory.holds():
            log.warning("the memory of tensors is not compared: of %s nothing is seen there", what)
            return False
    return True


def _resized(dim: int) -> Callable[[torch.Tensor], Any]:
    return lambda t: t.as_strided_([size - (i == dim) for i, size in enumerate(t.shape)], t.stride())


def _restrided(dim: int) -> Callable[[torch.Tensor], Any]:
    return lambda t: t.as_strided_(t.shape, [stride - (i == dim) for i, stride in enumerate(t.stride())])


def _set_data(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], Any]:
    return lambda t: setattr(t, "data", make(t.data))


_CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    **{f"size {dim}": _resized(dim) for dim in range(5)},
    **{f"stride {dim}": _restrided(dim) for dim in range(5)},
    "fewer dimensions": lambda t: t.as_strided_((2,), (1,)),
    "its place": lambda t: t.as_strided_(t.shape, t.stride(), 1),
    "its type": _set_data(lambda t: t.view(torch.int32)),
    "its sign": _set_data(_torch.negative_view),
    "a gradient": lambda t: t.requires_grad_(),
    "frozen": lambda t: t.requires_grad_(False),
    "a history": torch.enable_grad()(lambda t: t.add_(torch.ones(1, requires_grad=True))),
    "its class": lambda t: setattr(t, "__class__", torch.nn.Buffer),
}
"""Each changes one fact that ``TensorGuards`` check, and leaves the tensor's memory in place."""
