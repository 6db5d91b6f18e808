"""Observe everything about a result except its values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benchmarks.conformance._torch import hint, storage_id

__all__ = ["Observation", "TensorFacts", "observe"]


@dataclass(frozen=True)
class TensorFacts:
    """A tensor's metadata. ``shares`` is the place of the first tensor (inputs, results) on its storage."""

    shape: tuple[int | None, ...]
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    stride: tuple[int | None, ...] | None
    storage_offset: int | None
    requires_grad: bool
    is_conj: bool
    is_neg: bool
    shares: int | None
    same_object_as: int | None


@dataclass(frozen=True)
class Observation:
    """Results in order: :class:`TensorFacts` for a tensor, the name of the type for anything else."""

    leaves: tuple[TensorFacts | str, ...]


def observe(results: Any, inputs: Sequence[torch.Tensor] = ()) -> Observation:
    """Describe ``results`` (any pytree), including which of them share storage with ``inputs`` or each other.

    >>> x = torch.zeros(2, 3)
    >>> observe(x.t(), [x]).leaves[0].shares
    0
    >>> observe(x + 1, [x]).leaves[0].shares  # a storage of its own: it is the second tensor
    1
    """
    first_on_storage: dict[int, int] = {}
    place_of: dict[int, int] = {}
    for place, tensor in enumerate(inputs):
        place_of.setdefault(id(tensor), place)
        if _is_dense(tensor):
            first_on_storage.setdefault(storage_id(tensor), place)
    place = len(inputs)
    leaves: list[TensorFacts | str] = []
    for leaf in pytree.tree_leaves(results):
        if not isinstance(leaf, torch.Tensor):
            leaves.append(_kind(leaf))
            continue
        shares = first_on_storage.setdefault(storage_id(leaf), place) if _is_dense(leaf) else None
        leaves.append(_facts(leaf, shares, place_of.setdefault(id(leaf), place)))
        place += 1
    return Observation(tuple(leaves))


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
        return leaf.node.pytype.__name__
    return type(leaf).__name__


def _facts(tensor: torch.Tensor, shares: int | None, same_object_as: int | None) -> TensorFacts:
    dense = _is_dense(tensor)
    return TensorFacts(
        shape=tuple(hint(s) for s in tensor.shape),
        dtype=tensor.dtype,
        device=tensor.device,
        layout=tensor.layout,
        stride=tuple(hint(s) for s in tensor.stride()) if dense else None,
        storage_offset=hint(tensor.storage_offset()) if dense else None,
        requires_grad=tensor.requires_grad,
        is_conj=tensor.is_conj(),
        is_neg=tensor.is_neg(),
        shares=shares,
        same_object_as=same_object_as,
    )
