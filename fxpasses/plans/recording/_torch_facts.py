"""AOTAutograd's facts about a graph as plain data: the steps around compiled graphs, which plans take too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fake.seam.aot_autograd import OutputType, config as _functorch_config
from fake.seam.guards import TracingContext
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.tensors._torch_views import serialize_views
from fxpasses.plans.tensors.shards import RecordedShards, describe_placement


def runtime_facts() -> dict[str, Any]:
    """What the steps around the graph that AOTAutograd is compiling depend on.

    ``refused`` says why a plan cannot take these steps.
    """
    metadata: Any = TracingContext.get().fw_metadata
    return {"metadata": metadata, "refused": _why_unsupported(metadata)}


def plain_facts(
    metadata: Any, without_gradient: Sequence[int], shards: RecordedShards, *, autocast: bool
) -> dict[str, Any]:
    """The same as plain data, once the graphs are compiled.

    Args:
        metadata: of the compilation.
        without_gradient: the outputs of the backward graph that are not tensors.
        shards: among its inputs.
        autocast: whether it was on.

    Raises:
        NoPlan: the layout of a gradient is unknown.
    """
    tangents = []
    for known in metadata.subclass_tangent_meta:
        parts = list(getattr(known, "attrs", {}).values())
        # For a sharded tensor, the layout of the shard counts, which the graph receives.
        layout = (parts[0] if parts else known).memory_format
        if layout is None:
            raise NoPlan("a gradient of unknown layout")
        form = layout.memory_format
        size, stride = (None, None) if form is not None else (list(layout.size), list(layout.stride))
        placements = [list(map(describe_placement, known.meta[0]))] if parts else []
        tangents.append([size, stride, None if form is None else str(form), *placements])
    is_input = list(getattr(metadata, "saved_tensor_is_graph_input", []))
    updated = [metadata.input_info[i] for i in metadata.mutated_inp_runtime_indices]
    outputs, of_bases = metadata.output_info, range(metadata.num_intermediate_bases)
    # Tangents come for inputs with new values, outputs with memory of their own, and the bases of outputs.
    gradients = [info.mutates_data and info.requires_grad for info in updated]
    gradients += [
        info.output_type in _NON_ALIAS_TYPES
        and issubclass(info.raw_type, torch.Tensor)
        and getattr(info, "requires_grad_for_backward", info.requires_grad)  # 2.11 has the second only
        for info in outputs
    ]
    gradients += [True for _ in of_bases]
    infos = metadata.input_info
    places = [place for place, *_ in shards.gradients] or range(len(infos))
    # As AOTAutograd does, so that their producers do not receive zero gradients.
    detached = [
        i
        for i, (info, place) in enumerate(zip(infos, places, strict=True))
        if place in without_gradient and info.requires_grad and not info.is_leaf
    ]
    return {
        "outputs": metadata.num_outputs,
        "returns": metadata.num_forward_returns,
        "requires_grad": [bool(info.requires_grad) for info in (*updated, *outputs)],
        "unsafe_views": [len(updated) + i for i in metadata.unsafe_view_out_indices],
        "aliases": [
            [i, *_base_of(info, metadata), bool(info.requires_grad), serialize_views(info.view_meta_sequence)]
            for i, info in enumerate(outputs)
            if info.output_type not in _NON_ALIAS_TYPES
        ],
        "updated": [
            [i, info.mutates_data, info.mutates_metadata, info.is_leaf]
            for i, info in zip(metadata.mutated_inp_runtime_indices, updated, strict=True)
        ],
        "unchecked": int(metadata.num_tensors_saved_with_no_vc_check or 0),
        "saved_inputs": is_input,
        "tangents": tangents,
        "tangent_outputs": [i for i, has_one in enumerate(gradients) if has_one],
        "deterministic": metadata.deterministic,
        "donates": bool(metadata.bw_donated_idxs) and bool(_functorch_config.donated_buffer),
        "autocast": autocast,
        "detached": detached,
        "gradients": shards.gradients,
        "results": shards.results,
        "sharded": shards.positions,
        "opaque": int(metadata.num_opaque_objects_saved_for_bw or 0),
        "symints": int(metadata.num_symints_saved_for_bw or 0),
        "changed": [
            i for i, info in enumerate(metadata.input_info) if info.mutates_data or info.mutates_metadata
        ],
        "changed_for_autograd": list(metadata.mutated_graph_handled_indices_seen_by_autograd),
    }


def metadata_before_unwrapping(outputs: Sequence[Any]) -> tuple[Any, Sequence[Any]] | None:
    """The metadata of a graph with a backward graph before AOTAutograd unwrapped sharded inputs, and that of
    their gradients. ``None`` if no output of the call has it."""
    for output in outputs:
        function = getattr(getattr(output, "grad_fn", None), "_forward_cls", None)
        if (found := getattr(function, "maybe_subclass_metadata", None)) is not None:
            return function.metadata, found.grad_input_metas or ()  # type: ignore[union-attr]
    return None


_NON_ALIAS_TYPES = (OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.custom_function_view)


def _base_of(info: Any, metadata: Any) -> tuple[str, int]:
    """What an output is a view of: an input (which it may be itself), or an output of the graph."""
    if info.output_type is OutputType.is_input:
        return "input", info.base_idx
    if info.output_type is OutputType.alias_of_input:
        return "view of input", info.base_idx
    behind = info.output_type is not OutputType.alias_of_intermediate_base_is_user_output
    return "output", info.base_idx + behind * metadata.num_outputs


def _why_unsupported(metadata: Any) -> str:
    if any(info.mutates_storage_metadata for info in metadata.input_info):
        return "an input that is given other memory"
    if any(info.mutation_inductor_storage_resize for info in metadata.input_info):
        return "an input whose memory is resized"
    if not _functorch_config.view_replay_for_aliased_outputs and metadata.num_outputs_aliased:
        return "a setting by which views are not made again"
    if metadata.tokens or metadata.num_backward_tokens:
        return "effects whose order matters"
    if metadata.is_rng_op_functionalized or metadata.num_graphsafe_rng_states:
        return "random numbers that need a state of their own"
    if metadata.grad_enabled_mutation is not None:
        return "the gradient mode is changed"
    if metadata.indices_of_inputs_that_requires_grad_with_mutations_in_bw:
        return "a backward pass that changes inputs"
    return ""
