"""DTensors in Dynamo graphs: detect them, and pass them into and out of regions as local tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fake.seam.dispatch import OpOverload
from fake.seam.dtensor import is_dtensor, is_plain_placement, local_of, mesh_of, tensors_of_torch

_METHODS = frozenset({"redistribute", "to_local", "full_tensor", "from_local"})
FUNCTIONAL = frozenset({"_c10d_functional", "_c10d_functional_autograd"})
"""Namespaces of collectives that return a result to wait for."""


def spec_of(value: Any) -> Any:
    """Return mesh, placements and global size of a DTensor; ``None`` for any other value."""
    return value._spec if is_dtensor(value) else None


def mesh_and_placements(value: Any) -> tuple[Any, Sequence[Any]] | None:
    """Return a DTensor's mesh and placements; ``None`` if their repr does not describe them fully."""
    placements = value._spec.placements
    return (value._spec.mesh, placements) if all(map(is_plain_placement, placements)) else None


def wraps_or_gathers(node: fx.Node) -> bool:
    """Whether a call wraps, unwraps or redistributes a DTensor, or is a collective without side effects."""
    target = node.target
    if isinstance(target, WrapLocal):
        return True
    if isinstance(target, OpOverload):
        return target.namespace in FUNCTIONAL
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name in _METHODS and (
        any(is_dtensor(_value(n)) for n in node.all_input_nodes) or is_dtensor(_value(node))
    )


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))


class _Wrap(torch.autograd.Function):
    """Wraps a local tensor in a DTensor, and accepts its gradient unchanged: it records the placements."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, wrap: WrapLocal) -> Any:  # type: ignore[override]
        ctx.wrap = wrap
        ctx.set_materialize_grads(False)
        return tensors_of_torch().DTensor(local.view_as(local), wrap.spec, requires_grad=local.requires_grad)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:  # type: ignore[override]
        if gradient is None:
            return None, None
        ctx.wrap.grad_placements = tuple(gradient.placements)
        return gradient.to_local(), None


def gradient_of(spec: Any, placements: Sequence[Any] | None, local: torch.Tensor) -> Any:
    """Make the gradient of a DTensor whose local tensor was passed to a region.

    Args:
        spec: the spec of the DTensor.
        placements: the placements of the gradient.
        local: the gradient of the local tensor.
    """
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._utils import compute_global_tensor_info

    _, stride = compute_global_tensor_info(local, spec.mesh, spec.placements)
    meta = TensorMeta(spec.shape, tuple(stride), spec.tensor_meta.dtype)
    own = DTensorSpec(spec.mesh, tuple(placements or spec.placements), tensor_meta=meta)
    return tensors_of_torch().DTensor(local, own, requires_grad=local.requires_grad)


class _Call:
    """A graph function that makes DTensors of fixed mesh, placements and global size."""

    def __init__(self, value: Any) -> None:
        self.spec = value._spec
        sizes = f"{tuple(self.spec.shape)}, {tuple(self.spec.stride)}"
        self.__name__ = type(self).__name__
        self.__qualname__ = f"{self.__name__}[{self.spec.mesh}, {self.spec.placements}, {sizes}]"
        self.__module__ = __name__


class WrapLocal(_Call):
    """Called in a region's graph to make the DTensor of an input that is its local tensor.

    Attributes:
        spec: mesh, placements and global size.
        grad_placements: the placements of its gradient, once the backward pass was traced; ``None`` without a
            gradient.
    """

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.grad_placements: tuple[Any, ...] | None = None

    def __call__(self, local: torch.Tensor) -> Any:
        return _Wrap.apply(local, self)


class FromLocal(_Call):
    """Makes the DTensor of a local tensor returned by a region. Places its gradient for :func:`unwrap`."""

    def __call__(self, local: torch.Tensor) -> Any:
        spec = self.spec
        return tensors_of_torch().DTensor.from_local(
            local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )


def unwrap(value: Any) -> torch.Tensor:
    """Called in a region's graph to get the local tensor of an output."""
    return value.to_local()
