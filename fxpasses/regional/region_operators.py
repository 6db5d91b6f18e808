"""The operators that stand for regions in graphs.

The Dynamo graph calls ``fxpasses::region(key, tensors, sizes)``. Autograd splits it into ``region_forward``
and ``region_backward``, which are opaque to all later stages; their fake kernels return the recorded
metadata. The key is the region's content hash, so a cached graph that contains it is valid in any process in
which the region has the same content.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

import fake
from fxpasses.regional import _torch, _torch_dtensor
from fxpasses.regional.compiled_region import Bindings, CompiledRegion, Size, TensorSpec, table
from fxpasses.regional.region_tracing import functionalize_region_call, trace_region_call
from fxpasses.regional.sizes import simplify_stride

_library = torch.library.Library("fxpasses", "DEF")
_SIGNATURE = "(str key, Tensor[] tensors, SymInt[] sizes) -> Tensor[]"
_library.define(f"region{_SIGNATURE}")
_library.define(f"region_forward{_SIGNATURE}")
_library.define(f"region_forward_random{_SIGNATURE}", tags=(torch.Tag.nondeterministic_seeded,))
_library.define(f"region_backward{_SIGNATURE}")


class _Region(torch.autograd.Function):
    """The autograd formula of a region."""

    @staticmethod
    def forward(
        ctx: Any, region: CompiledRegion, sizes: list[Size], *tensors: torch.Tensor
    ) -> tuple[Any, ...]:  # type: ignore[override]
        """Run the forward operator, and save the bases of the backward operator's inputs.

        Args:
            ctx: autograd's context.
            region: the compiled region.
            sizes: values of its symbols.
            *tensors: its tensor inputs. Of a DTensor it takes the local tensor.
        """
        ctx.dtensors = [
            (spec, placements) if (spec := _torch_dtensor.spec_of(t)) is not None else None
            for t, placements in zip(tensors, region.grad_placements, strict=True)
        ]
        tensors = tuple(map(_torch_dtensor.local_of, tensors))
        results = _forward_operator(region)(region.key, list(tensors), sizes)
        bindings = region.bindings(sizes)
        outputs = tuple(source.get(tensors, results, bindings) for source in region.outputs)
        ctx.region, ctx.sizes = region, sizes
        ctx.save_for_backward(*(source.base(tensors, results) for source in region.saved))
        ctx.mark_non_differentiable(
            *(o for o, d in zip(outputs, region.differentiable, strict=True) if not d)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        region: CompiledRegion = ctx.region
        bindings = region.bindings(ctx.sizes)
        bases = ctx.saved_tensors
        taken = [source.view(base, bindings) for source, base in zip(region.saved, bases, strict=True)]
        wanted = [g for g, d in zip(gradients, region.differentiable, strict=True) if d]
        for gradient, spec in zip(wanted, region.tangents, strict=True):
            taken.append(_match_spec(gradient, spec, bindings))
        results = torch.ops.fxpasses.region_backward.default(region.key, taken, ctx.sizes)
        found: list[Any] = [source and source.get(taken, results, bindings) for source in region.gradients]
        for index, dtensor in enumerate(ctx.dtensors):
            if dtensor is not None and found[index] is not None:
                spec, placements = dtensor
                found[index] = _torch_dtensor.gradient_of(spec, placements, found[index])
        return (None, None, *found)


def _forward_operator(region: CompiledRegion) -> _torch.OpOverload:
    operators = torch.ops.fxpasses
    return operators.region_forward_random.default if region.random else operators.region_forward.default


def _equal_strides(strides: tuple[Size, ...], wanted: tuple[Size, ...]) -> bool:
    """Whether strides are equal, as numbers or expressions. Installs no guards."""
    return all(
        a == b
        if type(a) is int and type(b) is int
        else simplify_stride(_torch.expression(a)) == simplify_stride(_torch.expression(b))
        for a, b in zip(strides, wanted, strict=True)
    )


def _match_spec(
    tensor: torch.Tensor, spec: TensorSpec, bindings: Bindings, grad_placements: Any = None
) -> torch.Tensor:
    """Return a tensor with the strides and dtype that a region was compiled for, copied if its own differ.

    Decompositions may change strides with respect to Dynamo's graph, which regions are cut from (``cat`` with
    an empty tensor keeps those of the other one), and gradients may have any strides.
    """
    local = _torch_dtensor.local_of(tensor)
    if _equal_strides(local.stride(), spec.strides(bindings)) and local.dtype is spec.dtype:
        return tensor
    if local is not tensor:
        tensor = tensor.to_local(grad_placements=grad_placements)  # type: ignore[attr-defined]
    return spec.empty(bindings).copy_(tensor)


def region_call(key: str, tensors: list[torch.Tensor], sizes: list[Size]) -> list[torch.Tensor]:
    """Run ``fxpasses::region``, with autograd if a gradient is needed.

    Args:
        key: the region's content hash.
        tensors: its tensor inputs, or DTensors of them.
        sizes: values of its symbols.

    Returns:
        Its outputs.
    """
    region = table[key]
    bindings = region.bindings(sizes)
    tensors = [
        _match_spec(tensor, spec, bindings, placements)
        for tensor, spec, placements in zip(tensors, region.input_specs, region.grad_placements, strict=True)
    ]
    if region.backward is not None and torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return list(_Region.apply(region, list(sizes), *tensors))
    tensors = list(map(_torch_dtensor.local_of, tensors))
    results = _forward_operator(region)(key, tensors, sizes)
    return [source.get(tensors, results, bindings) for source in region.outputs]


def _run_forward(key: str, tensors: list[torch.Tensor], sizes: list[Size]) -> list[torch.Tensor]:
    with _torch.resolve_lazy_conj_and_neg():
        return table[key].run_forward(list(tensors), sizes)


def _run_backward(key: str, tensors: list[torch.Tensor], sizes: list[Size]) -> list[torch.Tensor]:
    with _torch.resolve_lazy_conj_and_neg():
        return table[key].run_backward(list(tensors), sizes)


def compiled_callable(node: fx.Node) -> Callable[..., Any] | None:
    """Return the callable behind a region's operator, bypassing torch's dispatcher.

    Args:
        node: any call.

    Returns:
        A function of the lists of tensors and sizes; ``None`` for any other call.
    """
    if node.target in _FORWARD:
        return table[str(node.args[0])].run_forward
    if node.target is torch.ops.fxpasses.region_backward.default:
        return table[str(node.args[0])].run_backward
    return None


def communicating_graph(node: fx.Node) -> fx.Graph | None:
    """Return the graph behind a region call if it has collectives. It takes sizes, then tensors."""
    direction = _direction_of(node)
    return table[str(node.args[0])].communicating.get(direction) if direction else None


def inlined_graph(node: fx.Node) -> fx.Graph | None:
    """Return the graph that replaces a region call after tracing, if it is only called during tracing."""
    direction = _direction_of(node)
    return table[str(node.args[0])].inlined.get(direction) if direction else None


def region_work(node: fx.Node) -> list[tuple[int, int]] | None:
    """Return FLOPs and bytes of each call in the region that a node calls; ``None`` for any other call."""
    direction = _direction_of(node)
    return table[str(node.args[0])].work[direction] if direction else None


def is_native(node: fx.Node) -> bool:
    """Whether a node calls a region whose operators are all PyTorch's own."""
    direction = _direction_of(node)
    exact = table[str(node.args[0])].exact.get(direction) if direction else None
    return exact is not None and exact.is_native


def _direction_of(node: fx.Node) -> str:
    """Return which half of a region a node calls, or ``""``."""
    if node.target in _FORWARD:
        return "forward"
    return "backward" if node.target is torch.ops.fxpasses.region_backward.default else ""


def _fake_forward(key: str, tensors: list[torch.Tensor], sizes: list[Size]) -> list[torch.Tensor]:
    region = table[key]
    bindings = region.bindings(sizes)
    return [spec.empty(bindings) for spec in region.forward_specs]


def _fake_backward(key: str, tensors: list[torch.Tensor], sizes: list[Size]) -> list[torch.Tensor]:
    region = table[key]
    bindings = region.bindings(sizes)
    return [spec.empty(bindings) for spec in region.backward_specs]


_library.impl("region", region_call, "CompositeImplicitAutograd")
for _name, _kernel, _fake in (
    ("region_forward", _run_forward, _fake_forward),
    ("region_forward_random", _run_forward, _fake_forward),
    ("region_backward", _run_backward, _fake_backward),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fxpasses::{_name}", _fake, lib=_library)
    _overload = getattr(torch.ops.fxpasses, _name).default
    fake.cache_custom_op(_overload)  # equal keys have equal metadata
    for _mode, _rule in (
        (_torch.FunctionalTensorMode, functionalize_region_call),
        (_torch.ProxyTorchDispatchMode, trace_region_call),
    ):
        torch.library.register_torch_dispatch(f"fxpasses::{_name}", _mode, _rule, lib=_library)
_FORWARD = (torch.ops.fxpasses.region_forward.default, torch.ops.fxpasses.region_forward_random.default)
REGION = torch.ops.fxpasses.region.default
"""The operator that Dynamo graphs call for a region."""
