"""Whether tensors are what they were: their class, sizes, strides, dtype and whether they require gradients.

``TensorGuards`` of torch asks each tensor. In between, it is enough that the memory in which torch says what a tensor is has not
changed: the library of :mod:`fxpasses.plans.native` compares it in a tenth of the time.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxpasses.plans import _torch, native

__all__ = ["SameTensors"]

log = logging.getLogger(__name__)


class SameTensors:
    """Asks whether these tensors are what they were."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._guards = _torch.tensor_guards(tensors) if tensors else None
        inside = [tensor for tensor in tensors if tensor.dim() <= _torch.TENSOR_LAYOUT.dims]
        kinds = {(t.is_conj(), t.is_neg(), t.is_inference()): t for t in inside}.values()
        # Those of more dimensions have their sizes elsewhere; one of each kind tells which dispatch keys count in the thread.
        self._asked = [*kinds, *(tensor for tensor in tensors if tensor.dim() > _torch.TENSOR_LAYOUT.dims)]
        self._guards_of_asked: Any = _torch.tensor_guards(self._asked) if inside else None
        self._inside = tuple(inside)
        self._memory: Any = None

    def hold(self) -> bool:
        """Whether they are."""
        if self._guards is None:
            return True
        if self._memory is not None and self._memory.holds():
            return bool(self._guards_of_asked.check(*self._asked))
        memory = compared(self._inside)
        if not self._guards.check(*self._tensors):
            return False
        self._memory = memory  # which was taken before the guards held
        return True


def compared(tensors: tuple[torch.Tensor, ...]) -> Any:
    """A check of the memory of these tensors, as it is now, or None where there is none."""
    if not tensors or not native.compares_memory() or not _is_understood():
        return None
    return native.memory_of(tensors, _torch.TENSOR_LAYOUT)


@functools.cache
def _is_understood() -> bool:
    """Whether each change of a tensor is seen in its memory: tried once in a process."""
    if not _torch.TENSOR_LAYOUT.is_known():
        return False
    for what, change in _CHANGES.items():
        tensor = torch.empty(1000).as_strided((2, 3, 4, 5, 6), (400, 120, 30, 6, 1)).data
        tensor.requires_grad_().requires_grad_(what == "frozen")  # now autograd knows of it
        memory = native.memory_of((tensor,), _torch.TENSOR_LAYOUT)
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


def _in_place_of(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], Any]:
    return lambda t: setattr(t, "data", make(t.data))


_CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    **{f"size {dim}": _resized(dim) for dim in range(5)},
    **{f"stride {dim}": _restrided(dim) for dim in range(5)},
    "fewer dimensions": lambda t: t.as_strided_((2,), (1,)),
    "its place": lambda t: t.as_strided_(t.shape, t.stride(), 1),
    "its type": _in_place_of(lambda t: t.view(torch.int32)),
    "its sign": _in_place_of(_torch.negative_view),
    "a gradient": lambda t: t.requires_grad_(),
    "frozen": lambda t: t.requires_grad_(False),
    "a history": torch.enable_grad()(lambda t: t.add_(torch.ones(1, requires_grad=True))),
    "its class": lambda t: setattr(t, "__class__", torch.nn.Buffer),
}
"""Each changes one thing that ``TensorGuards`` asks for, and leaves the tensor's memory where it is."""
