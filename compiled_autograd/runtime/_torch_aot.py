"""Private names of torch for the backward graphs that AOTAutograd keeps in the functions it makes.

Read from ``torch/_functorch/_aot_autograd/runtime_wrappers.py`` (``_AOTDispatchAutogradFunctionFactory``) and
``proxy_call_aot_backward`` of ``torch/_dynamo/compiled_autograd.py`` (2.13 to 2.15).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.runtime_wrappers import (
    AOTDispatchAutograd,
    AutogradLazyBackwardCompileInfo,
    CachedAutogradLazyBackwardCompileInfo,
)
from torch._functorch._aot_autograd.schemas import MemoryFormatMeta, PlainTensorMeta

from fake.seam.dispatch import (
    DisableAutocast as autocast_disabled,
    HigherOrderOperator,
    disable_current_modes as _disable_current_modes,
    is_any_autocast_enabled as autocast_enabled,
)
from fake.seam.fake_tensor import unset_fake_temporarily


def is_compiled_function(function: Any) -> bool:
    """Whether AOTAutograd made this custom Function, and calls its backward in the way we know."""
    return hasattr(function, "_aot_id") and hasattr(function, "_bw_prologue_fn")


def backward_module(function: Any) -> fx.GraphModule | str:
    """The backward graph that ``function`` keeps, as AOTAutograd gave it to its compiler; or why there is none."""
    info = function._lazy_backward_info
    if isinstance(info, AutogradLazyBackwardCompileInfo):
        return info.bw_module  # type: ignore[return-value]
    if isinstance(info, CachedAutogradLazyBackwardCompileInfo):
        with unset_fake_temporarily(), _disable_current_modes():
            return info.bw_module_fn()
    return "it came from a compile cache, without its backward graph"


_FROM_SEED = ("prims.inductor_random.default", "prims.inductor_randint.default")


def draws_from_seed(module: fx.GraphModule) -> bool:
    """Whether a graph draws random numbers from seeds as Inductor's code does: eager's kernels ignore the seed."""
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    return any(str(node.target) in _FROM_SEED for graph in graphs for node in graph.nodes)


def numbers_of(ctx: Any) -> Sequence[Any]:
    """The sizes that a compiled function saved, as C++ lifted them for this capture."""
    return ctx._get_compiled_autograd_symints()


def prologue_arguments(
    function: Any, saved: Any, numbers: Any, objects: Any, gradients: list[Any]
) -> list[Any]:
    """What AOTAutograd passes to the backward graph of ``function``, in its order; gradients as they came."""
    return function._bw_prologue_fn(saved, numbers, objects, gradients)


def tangent_formats(metadata: Any) -> list[tuple[Any, Any, Any]]:
    """Per gradient that a backward graph takes: the memory format, sizes and strides that it was traced for."""
    formats = [tangent.memory_format for tangent in metadata.subclass_tangent_meta]
    return [(found.memory_format, found.size, found.stride) for found in formats]


def coerce_tangent(grad: Any, memory_format: Any, size: Any, stride: Any) -> torch.Tensor:
    """A gradient of another kind than a plain tensor, as AOTAutograd passes it to a graph for plain tensors."""
    expected = PlainTensorMeta(0, MemoryFormatMeta(size, stride, memory_format))
    return AOTDispatchAutograd.process_runtime_tangent(grad, expected)[0]
