"""Convert a model of ``fully_shard`` (FSDP2) to gathers in the graph: hooks are removed, shards are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fake.seam.pytree import tree_map_only
from fxpasses.distributed import _torch_fsdp
from fxpasses.distributed.gathering import Gather, gather_in_graph
from fxpasses.errors import ShardingError


def is_fully_sharded(model: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on a module of a model."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def convert_fully_sharded(model: nn.Module) -> None:
    """Gather the parameters of a model where they are read, with calls in the graph instead of FSDP2 hooks.

    Parameters stay the same objects, and gathers and reductions follow its policies. Inputs and outputs that
    the hooks cast are cast.

    Raises:
        ShardingError: before anything is changed; names the parameter and the setting that only the hooks
            support.
    """
    states = _torch_fsdp.states(model)
    parameters = [managed for state in states for managed in _torch_fsdp.managed(state)]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for managed in parameters:
        module, name = managed.owners[0]
        if managed.refused:
            raise ShardingError(names.get(id(module._parameters[name]), name), managed.refused)
        if isinstance(module, nn.RNNBase):
            raise ShardingError(
                name, f"{type(module).__name__} keeps its weights in a list of its own: use cells"
            )
    for state in states:
        modules, casts = _torch_fsdp.modules_of(state), _torch_fsdp.cast_dtypes(state)
        _torch_fsdp.remove_hooks(state)
        for module in modules:
            _cast(module, *casts)
    wrapped = [module for state in states for module in _torch_fsdp.modules_of(state)]
    gathers: dict[nn.Module, dict[str, Gather]] = {module: {} for module in wrapped}
    for managed in parameters:
        reduce = managed.reduce_dtype or managed.param_dtype
        gather = Gather(managed.mesh, managed.dimension, managed.param_dtype, reduce, managed.inner)
        for module, name in managed.owners:
            gathers.setdefault(module, {})[name] = gather
    gather_in_graph(gathers, dict.fromkeys(wrapped, _METHODS))


def _cast(module: nn.Module, inputs: torch.dtype | None, outputs: torch.dtype | None) -> None:
    """Cast floating-point tensors like the hooks of a mixed precision policy."""
    if inputs is not None:
        module.register_forward_pre_hook(_CastInputs(inputs), prepend=True, with_kwargs=True)
    if outputs is not None:
        module.register_forward_hook(_CastOutputs(outputs))


@dataclass(eq=False)
class _CastInputs:
    """A hook that casts floating-point arguments. A class, so that a plan can find it by name."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _floats_to(self.dtype, args), _floats_to(self.dtype, kwargs)


@dataclass(eq=False)
class _CastOutputs:
    """A hook that casts floating-point results."""

    dtype: torch.dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _floats_to(self.dtype, output)


def _floats_to(dtype: torch.dtype, values: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values)


_SCHEDULING_METHODS = (
    "reset_iter_state", "reshard", "set_is_last_backward", "set_modules_to_backward_prefetch", "set_modules_to_forward_prefetch", "set_post_optim_event",
    "set_requires_all_reduce", "set_requires_gradient_sync", "set_reshard_after_backward", "set_reshard_after_forward", "set_unshard_in_backward",
)  # fmt: skip
"""FSDPModule methods that say when to send, which passes decide. Each backward reduces: the sum is equal."""


def _no_op(self: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces a method of FSDPModule whose work is done elsewhere."""


def _unsupported_method(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ShardingError(
            "",
            f"{name}() is FSDP2's: gathers and reductions are in the graph now. Call it before shard(model), or not",
        )

    return method


_METHODS = {
    name: _no_op if name in _SCHEDULING_METHODS else _unsupported_method(name)
    for name in vars(FSDPModule)
    if not name.startswith("_")
}
