"""Private torch names of the partitioner, and every difference between releases.

This file is AOTAutograd's contract for a partition function: how it marks placeholders, which tags it puts on
nodes, and which rewrites of the two graphs it expects. The decision what to save is not taken from torch.
"""

import inspect
from collections import ChainMap
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx
from torch._functorch import partitioners as _partitioners
from torch._functorch._activation_offloading.activation_offloading import enable_activation_offloading
from torch._functorch._aot_autograd.descriptors import (
    InputMutationAOTOutput,
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
)
from torch._functorch._aot_autograd.utils import (
    _is_bwd_seed_offset as is_backward_seed,
    _is_fwd_seed_offset as is_forward_seed,
    _is_primal as is_primal,
    _is_tangent as is_tangent,
    is_with_effects,
)
from torch._functorch.partitioners import (
    _has_tag_is_backward as tagged_backward,
    _must_be_in_backward as must_be_in_backward,
    _must_be_in_forward as must_be_in_forward,
    _sync_decision_cross_ranks as sync_decision_cross_ranks,
    cleanup_recompute_tags,
    default_partition,
    force_save_bw_mutation_src,
    force_save_collectives,
    force_save_effectful_ops,
    functionalize_rng_ops,
    get_default_op_list,
    has_recomputable_ops,
    has_recomputable_rng_ops,
    min_cut_rematerialization_partition,
    must_recompute,
    thread_graphsafe_rng_from_hops,
)
from torch._inductor.custom_graph_pass import get_hash_for_files
from torch._library.fake_class_registry import FakeScriptObject
from torch.fx.experimental import symbolic_shapes as _symbolic_shapes
from torch.fx.experimental._backward_state import BackwardState
from torch.fx.experimental.proxy_tensor import is_sym_node
from torch.utils._ordered_set import OrderedSet
from torch.utils.flop_counter import flop_registry as _flop_registry

from fake.seam import pytree
from fake.seam.aot_autograd import config as functorch_config
from fake.seam.dispatch import HigherOrderOperator, OpOverload
from fake.seam.inductor import CustomPartitionerFn, config as inductor_config

_ATEN: Any = torch.ops.aten
flop_registry: Mapping[Any, Any] = ChainMap(
    _flop_registry,  # users may extend it
    {
        getattr(_ATEN, f"_scaled_dot_product_{kernel}{half}"): _flop_registry[
            getattr(_ATEN, f"_scaled_dot_product_flash_attention{half}")
        ]
        for kernel in ("flash_attention_for_cpu", "fused_attention_overrideable")
        for half in ("", "_backward")
    },
)
"""FLOP formulas by operator. Torch 2.13 has none for two of its attention kernels, which take the arguments
of the others."""

UNBACKED_FALLBACK = 4096
"""The hint for an unbacked size when estimating bytes and FLOPs: torch's own choice."""

# torch 2.12 renamed `size_hint` and made it stop guarding.
_hint: Any = getattr(_symbolic_shapes, "optimization_hint", None) or getattr(
    _symbolic_shapes, "size_hint", None
)


def hint_of(size: int | torch.SymInt) -> int:
    """An integer for `size`, for estimates only: no guard is installed."""
    if isinstance(size, int):
        return size
    return int(_hint(size, fallback=UNBACKED_FALLBACK))


# torch 2.12 gave opaque values their own section among the saved values, and added per-region budgets.
_opaque_predicate = getattr(_partitioners, "is_opaque_node", None)
_budget_annotation = getattr(_partitioners, "_get_memory_budget_annotation", None)
_quantizes_by_position = (
    "num_fwd_outputs" in inspect.signature(_partitioners.enable_activation_quantization).parameters
)


def is_opaque(node: fx.Node) -> bool:
    """Whether the node's value is an opaque object (such as a process group), not a tensor or symbol."""
    if _opaque_predicate is not None:
        return bool(_opaque_predicate(node))
    return isinstance(node.meta.get("val"), FakeScriptObject | torch.ScriptObject)


def overwritten_inputs(placeholders: list[fx.Node], output_descriptions: list[Any]) -> list[fx.Node]:
    """Inputs that AOTAutograd's runtime wrapper overwrites with an output after the forward graph has run.

    This is read from AOTAutograd's descriptors of inputs and outputs. A graph without them has no such
    inputs.
    """
    overwritten = [
        _base_description(_base_description(description).mutated_input)
        for description in output_descriptions
        if isinstance(_base_description(description), InputMutationAOTOutput)
    ]
    return (
        [node for node in placeholders if _base_description(node.meta.get("desc")) in overwritten]
        if overwritten
        else []
    )


def _base_description(description: Any) -> Any:
    """The description of the user's value. A tensor subclass's inner tensors are described as parts of it."""
    while description is not None and hasattr(description, "base"):
        description = description.base
    return description


def outputs_of(joint: fx.GraphModule) -> tuple[list[Any], list[Any]]:
    """The flattened outputs of a joint graph, and AOTAutograd's descriptor of each (None if it has none)."""
    (output,) = joint.graph.find_nodes(op="output")
    values = pytree.arg_tree_leaves(*output.args)
    return values, pytree.arg_tree_leaves(output.meta.get("desc", [None] * len(values)))


def saved_value_description(position: int, without_version_check: bool) -> Any:
    """AOTAutograd's descriptor of a saved value among the forward graph's outputs."""
    if without_version_check:
        return SavedForBackwardsNoVcCheckAOTOutput(position)
    return SavedForBackwardsAOTOutput(position)


def make_graph_module(joint: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """Make a module with the attributes of `joint` that `graph` uses. Its code is generated on first call."""
    return fx._lazy_graph_module._make_graph_module(joint, graph)


def symbol_bindings(graph: fx.Graph) -> dict[Any, fx.Node]:
    """The node from which each symbol in the graph's sizes can be read."""
    return _symbolic_shapes.find_symbol_binding_fx_nodes(graph)


def symbol_bound_by(node: fx.Node) -> Any:
    """The symbol that the node's value is, if it is exactly one symbol."""
    return _symbolic_shapes.is_symbol_binding_fx_node(node)


def symbols_in(value: Any) -> list[Any]:
    """The symbols in a value's sizes and strides, sorted by name."""
    return sorted(_symbolic_shapes.free_symbols(value), key=lambda symbol: symbol.name)


def apply_user_rewrites(
    saved: list[fx.Node],
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    static_inputs: list[fx.Node],
    num_fwd_outputs: int,
) -> None:
    """Apply torch's switches for saved values: quantize them, or offload them to the host."""
    if inductor_config.post_grad_fusion_options.get("activation_quantization_aten_pass") is not None:
        extra = (num_fwd_outputs,) if _quantizes_by_position else ()
        _partitioners.enable_activation_quantization(
            saved, forward, backward, OrderedSet(static_inputs), *extra
        )
    if functorch_config.enable_activation_offloading:
        enable_activation_offloading(forward, backward, num_fwd_outputs, OrderedSet(static_inputs))


def region_memory_budget(node: fx.Node) -> float | None:
    """The budget that the user set on the region in which the node was traced, if any."""
    return _budget_annotation(node) if _budget_annotation is not None else None


def marked_memory_budget(graph: fx.Graph) -> float | None:
    """The budget of torch's older marker: one node carries it for the whole graph."""
    budgets = (node.meta.get("memory_budget") for node in graph.nodes)
    return next((budget for budget in budgets if isinstance(budget, float)), None)


def input_behind_backward_output(node: fx.Node) -> Any:
    """Return the input whose new state a forward output is, if only the backward pass computes that output.

    A forward graph returns an input that the backward pass overwrites in its state before that. None if there
    is no such input.
    """
    if node.target is torch.ops.aten.copy_.default:
        return node.args[0]
    return _partitioners._is_copy_node_bw_only(node) or _partitioners._get_ho_op_original_input(node)
