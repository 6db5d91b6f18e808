"""Every private name of torch that the partitioner relies on, and every difference between releases.

What is here is AOTAutograd's contract for a partition function: how it marks placeholders, which tags it puts on nodes,
and which rewrites it expects of the two graphs. The decision what to save is not taken from torch.
"""

from typing import Any

import torch
import torch.fx as fx
from torch._functorch import config as functorch_config
from torch._functorch import partitioners as _partitioners
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._functorch._aot_autograd.utils import (
    _is_bwd_seed_offset as is_backward_seed,
)
from torch._functorch._aot_autograd.utils import (
    _is_fwd_seed_offset as is_forward_seed,
)
from torch._functorch._aot_autograd.utils import (
    _is_primal as is_primal,
)
from torch._functorch._aot_autograd.utils import (
    _is_tangent as is_tangent,
)
from torch._functorch._aot_autograd.utils import is_with_effects
from torch._functorch.compile_utils import fx_graph_cse, raise_getitems
from torch._functorch.partitioners import (
    _extract_fwd_bwd_outputs as extract_forward_backward_outputs,
)
from torch._functorch.partitioners import (
    _has_tag_is_backward as tagged_backward,
)
from torch._functorch.partitioners import (
    _must_be_in_backward as must_be_in_backward,
)
from torch._functorch.partitioners import (
    _must_be_in_forward as must_be_in_forward,
)
from torch._functorch.partitioners import (
    _sync_decision_cross_ranks as sync_decision_cross_ranks,
)
from torch._functorch.partitioners import (
    cleanup_recompute_tags,
    default_partition,
    force_save_bw_mutation_src,
    force_save_collectives,
    force_save_effectful_ops,
    functionalize_rng_ops,
    get_default_op_list,
    has_recomputable_ops,
    has_recomputable_rng_ops,
    must_recompute,
    reordering_to_mimic_autograd_engine,
    thread_graphsafe_rng_from_hops,
)
from torch._library.fake_class_registry import FakeScriptObject
from torch.fx.experimental import symbolic_shapes as _symbolic_shapes
from torch.fx.experimental._backward_state import BackwardState
from torch.fx.experimental.proxy_tensor import is_sym_node, py_sym_types
from torch.utils.flop_counter import flop_registry

__all__ = [
    "BackwardState",
    "FakeScriptObject",
    "cleanup_recompute_tags",
    "default_partition",
    "extract_forward_backward_outputs",
    "extract_modules",
    "flop_registry",
    "force_save_bw_mutation_src",
    "force_save_collectives",
    "force_save_effectful_ops",
    "functionalize_rng_ops",
    "functorch_config",
    "fx_graph_cse",
    "get_default_op_list",
    "has_recomputable_ops",
    "has_recomputable_rng_ops",
    "hint_of",
    "is_assert_only_bool",
    "is_backward_seed",
    "is_forward_seed",
    "is_opaque",
    "is_primal",
    "is_sym_node",
    "is_tangent",
    "is_with_effects",
    "must_be_in_backward",
    "must_be_in_forward",
    "must_recompute",
    "overwritten_inputs",
    "py_sym_types",
    "raise_getitems",
    "region_memory_budget",
    "reordering_to_mimic_autograd_engine",
    "sync_decision_cross_ranks",
    "tagged_backward",
    "thread_graphsafe_rng_from_hops",
]

UNBACKED_FALLBACK = 4096
"""What an unbacked size is taken for when bytes and FLOPs are estimated: torch's own choice."""

# torch 2.12 renamed `size_hint` and taught it not to guard.
_hint = getattr(_symbolic_shapes, "optimization_hint", None) or _symbolic_shapes.size_hint


def hint_of(size: int | torch.SymInt) -> int:
    """A plain number for `size`, for estimates only: no guard is installed."""
    if isinstance(size, int):
        return size
    return int(_hint(size, fallback=UNBACKED_FALLBACK))


# torch 2.12 gave opaque values a section of their own among the saved ones, and region-wise budgets.
_opaque_predicate = getattr(_partitioners, "is_opaque_node", None)
_budget_annotation = getattr(_partitioners, "_get_memory_budget_annotation", None)


def is_opaque(node: fx.Node) -> bool:
    """Whether the node's value is neither a tensor nor a symbol but an opaque object (a process group, say)."""
    if _opaque_predicate is not None:
        return bool(_opaque_predicate(node))
    return isinstance(node.meta.get("val"), FakeScriptObject | torch.ScriptObject)


def overwritten_inputs(placeholders: list[fx.Node], output_descriptions: list[Any]) -> list[fx.Node]:
    """Inputs that AOTAutograd's run-time wrapper overwrites with an output when the forward graph has run.

    Read off the descriptors that AOTAutograd puts on inputs and outputs; a graph without them has none.
    """
    overwritten = [
        _outer(_outer(description).mutated_input)
        for description in output_descriptions
        if isinstance(_outer(description), InputMutationAOTOutput)
    ]
    return (
        [node for node in placeholders if _outer(node.meta.get("desc")) in overwritten] if overwritten else []
    )


def _outer(description: Any) -> Any:
    """The description of the user's value; a tensor subclass's inner tensors are described as parts of it."""
    while description is not None and hasattr(description, "base"):
        description = description.base
    return description


def is_assert_only_bool(node: fx.Node) -> bool:
    """Whether the node is a symbolic bool that only run-time assertions read; the backward pass never needs it."""
    return (
        isinstance(node.meta.get("val"), torch.SymBool)
        and len(node.users) > 0
        and all(user.target is torch.ops.aten._assert_scalar.default for user in node.users)
    )


def extract_modules(
    joint: fx.GraphModule,
    saved_values: list[fx.Node],
    saved_symbols: list[fx.Node],
    saved_opaque: list[fx.Node],
    **kwargs: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """torch's own extraction of the two modules, given what is saved."""
    if _opaque_predicate is None:
        return _partitioners._extract_fwd_bwd_modules(
            joint, saved_values + saved_opaque, saved_sym_nodes=saved_symbols, **kwargs
        )
    return _partitioners._extract_fwd_bwd_modules(
        joint, saved_values, saved_sym_nodes=saved_symbols, saved_opaque_nodes=saved_opaque, **kwargs
    )


def region_memory_budget(node: fx.Node) -> float | None:
    """The budget that the user put on the region the node was traced in, if any."""
    budget = _budget_annotation(node) if _budget_annotation is not None else None
    legacy = node.meta.get("memory_budget")
    if budget is None and isinstance(legacy, float):
        return legacy
    return budget
