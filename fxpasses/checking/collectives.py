"""What processes send each other, made up: a graph is looked at by one process alone.

The others may look at other graphs, or at none, so that a real collective would wait for them. And in a group of one
process a reduction that is left out, or a mean for a sum, cannot be seen. So each run behaves as if there were three
processes, of which the others hold multiples of what this one holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["simulated"]

_OTHERS = (0.5, -2.0)
"""What the others hold, as multiples: whole numbers are multiplied and rounded."""


def simulated(target: Any) -> Any:
    """What to call in a run instead of a collective; any other operator is called itself."""
    return _SIMULATED.get(str(target), target) if "_c10d_functional" in str(target) else target


def _held(value: Tensor) -> list[Tensor]:
    return [value, *((value * factor).to(value.dtype) for factor in _OTHERS)]


def _reduced(value: Tensor, kind: str) -> Tensor:
    parts = torch.stack(_held(value))
    if kind == "sum":
        return parts.sum(0).to(value.dtype)
    if kind == "avg":
        return (parts.sum(0) / len(parts)).to(value.dtype)
    if kind in ("min", "max"):
        return parts.amin(0) if kind == "min" else parts.amax(0)
    if kind == "product":
        return parts.prod(0).to(value.dtype)
    raise NotImplementedError(f"a reduction of kind {kind!r} cannot be made up")


def _all_reduce(value: Tensor, kind: str, group: Any) -> Tensor:
    return _reduced(value, kind)


def _all_reduce_in_place(value: Tensor, kind: str, group: Any) -> Tensor:
    return value.copy_(_reduced(value, kind))


def _several(one: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    return lambda values, *args: [one(value, *args) for value in values]


def _all_gather(value: Tensor, size: int, group: Any) -> Tensor:
    return torch.cat([(value * (1 + k)).to(value.dtype) for k in range(size)])


def _reduce_scatter(value: Tensor, kind: str, size: int, group: Any) -> Tensor:
    return _reduced(value.chunk(size)[0], kind)


def _broadcast(value: Tensor, source: int, group: Any) -> Tensor:
    return (value * _OTHERS[0]).to(value.dtype)


def _broadcast_in_place(value: Tensor, source: int, group: Any) -> Tensor:
    return value.copy_(_broadcast(value, source, group))


def _wait(value: Tensor) -> Tensor:
    return value


_BY_NAME: dict[str, Callable[..., Any]] = {
    "all_reduce.default": _all_reduce,
    "all_reduce_.default": _all_reduce_in_place,
    "all_reduce_coalesced.default": _several(_all_reduce),
    "all_reduce_coalesced_.default": _several(_all_reduce_in_place),
    "all_gather_into_tensor.default": _all_gather,
    "all_gather_into_tensor_coalesced.default": _several(_all_gather),
    "reduce_scatter_tensor.default": _reduce_scatter,
    "reduce_scatter_tensor_coalesced.default": _several(_reduce_scatter),
    "broadcast.default": _broadcast,
    "broadcast_.default": _broadcast_in_place,
    "wait_tensor.default": _wait,
}
_SIMULATED = {f"_c10d_functional.{name}": made for name, made in _BY_NAME.items()}
