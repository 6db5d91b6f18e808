"""What ``fully_shard`` (FSDP2) attaches to a model, and how to remove it. Uses private torch names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state


@dataclass(frozen=True)
class Managed:
    """A parameter that FSDP2 manages.

    Attributes:
        owners: the modules that hold it, and its names there.
        mesh: the mesh over which it is sharded. If it has two dimensions, the first is replicas.
        dimension: the sharded dimension.
        inner: mesh and placements of the gathered tensor, if that is a DTensor itself (tensor parallelism),
            and its local size in ``dimension``.
        param_dtype: the dtype of the gathered tensor, or ``None``.
        reduce_dtype: the dtype in which gradients are reduced, or ``None``.
        refused: why it cannot be read as a shard, or ``""``.
    """

    owners: tuple[tuple[nn.Module, str], ...]
    mesh: Any
    dimension: int | None
    inner: tuple[Any, tuple[Any, ...], int] | None
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    refused: str


def states(model: nn.Module) -> list[FSDPState]:
    """Return the states of modules on which ``fully_shard`` was called; one for modules passed together."""
    found = (_get_module_fsdp_state(module) for module in model.modules())
    return list(dict.fromkeys(state for state in found if state is not None))


def managed(state: FSDPState) -> Iterator[Managed]:
    """Yield the parameters of one state."""
    for group in state._fsdp_param_groups:
        common = _unsupported_setting(group)
        for parameter in group.fsdp_params:
            info, mesh_info, spec = (
                parameter._module_info,
                parameter.mesh_info,
                parameter._unsharded_dtensor_spec,
            )
            policy, placement = parameter.mp_policy, parameter.fsdp_placement
            sharded = getattr(mesh_info, "shard_mesh_dim", None) is not None
            refused = common
            if hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather"):
                refused = "its tensor gathers itself (fsdp_pre_all_gather)"
            if mesh_info.is_spmd_mesh:
                refused = "it was sharded with dp_mesh_dims"
            if parameter.unsharded_accumulated_grad is not None:
                refused = "a gradient is accumulated that no process has reduced: read the model after a step of the optimizer"
            owners = [(info.module, info.param_name)]
            owners += zip(info.shared_modules, info.shared_param_names, strict=True)
            yield Managed(
                tuple(owners),
                mesh_info.mesh,
                placement.dim if sharded else None,
                None
                if spec is None
                else (spec.mesh, tuple(spec.placements), parameter._orig_size[placement.dim]),
                policy.param_dtype,
                policy.reduce_dtype,
                refused,
            )


def _unsupported_setting(group: Any) -> str:
    """Return the setting that only FSDP2's own gathers and reductions support, if any, or ``""``."""
    if type(group.offload_policy).__name__ != "OffloadPolicy":
        return f"offload_policy={group.offload_policy}"
    for name, default in (
        ("gradient_divide_factor", None),
        ("_all_reduce_hook", None),
        ("force_sum_reduction_for_comms", False),
    ):
        if getattr(group, name) != default:
            return f"{name.strip('_')}={getattr(group, name)}"
    for name in ("_all_gather_comm", "_reduce_scatter_comm"):
        if not type(getattr(group, name)).__name__.startswith("Default"):
            return f"its own communication, {type(getattr(group, name)).__name__}"
    return ""


def modules_of(state: FSDPState) -> tuple[nn.Module, ...]:
    """Return the modules on which ``fully_shard`` was called."""
    return tuple(state._modules)


def cast_dtypes(state: FSDPState) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Return the dtypes to which the modules' inputs and outputs are cast."""
    policy = state._mp_policy
    return policy.param_dtype if policy.cast_forward_inputs else None, policy.output_dtype


def remove_hooks(state: FSDPState) -> None:
    """Remove hooks, classes and marks from the modules of a state. Parameters stay unchanged and sharded."""
    for group in state._fsdp_param_groups:
        group.reshard()
        hooks = (
            group._module_to_pre_save_state_dict_hook_handle,
            group._module_to_pre_load_state_dict_hook_handle,
        )
        for handle in (handle for handles in hooks for handle in handles.values()):
            handle.remove()
        for parameter in group.fsdp_params:
            parameter._post_load_hook_handle.remove()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for module in state._modules:
        kind: Any = type(module)  # FSDPLinear, of FSDPModule and Linear
        module.__class__ = kind.__mro__[kind._orig_cls_mro_index]
        _module_state_mapping.pop(module, None)
        for key in (STATE_KEY, REGISTRY_KEY):
            module.__dict__.pop(key, None)
        for inner in module.modules():
            for mark in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
                inner.__dict__.pop(mark, None)
