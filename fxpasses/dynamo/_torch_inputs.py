"""Make graph inputs for parameters like another one's. Private torch names.

Dynamo makes some forty checks before it turns a tensor into a graph input: whether it is a view, sparse,
nested, a subclass, marked as dynamic, on the storage of another input, and what a program may learn from its
metadata. Each weight of a copied layer gives the same answers as that of the traced layer, so its input,
variable and guard are modeled on those.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import fx
from torch._dynamo.side_effects import AttributeMutationNew
from torch._dynamo.variables.builder import GraphArg, is_dynamic_source
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatefulSymbolicContext, SubclassSymbolicContext
from torch.utils.weak import TensorWeakRef

from fake.seam.dispatch import dispatch_keys, enable_python_dispatcher
from fake.seam.dtensor import is_dtensor, local_of
from fake.seam.dynamo import GuardBuilder, TensorVariable
from fake.seam.guards import Guard, TracingContext
from fake.seam.symbolic_shapes import AttrSource


def inputs_like(tx: Any) -> Callable[[Any, Any, fx.Node], Any]:
    """Return a function ``(source, value, input)`` for the call that Dynamo is tracing.

    It makes a parameter an input of the graph, modeled on another ``input``, and returns its variable. It
    returns None for anything but an ordinary parameter, and for one that differs from the other one.
    """
    output = tx.output
    effects, context, stack = output.side_effects, output.tracing_context, TracingContext.extract_stack()

    def note(source: Any, value: Any, symbolic: Any, fake: Any) -> None:
        context.tensor_to_context[value] = symbolic
        output.input_source_to_sizes_strides[source] = {"size": fake.size(), "stride": fake.stride()}
        output.tracked_fakes_id_to_source[id(value)].append(source)

    def make(source: Any, value: Any, pattern: fx.Node) -> Any:
        argument = pattern.meta["grapharg"]
        known = output.input_source_to_var.get(argument.source)
        symbolic = context.tensor_to_context.get(argument.example)
        if (
            type(known) is not TensorVariable
            or value in effects
            or source in output.input_source_to_var
            or source in output.variable_tracker_cache
            or source.guard_source != argument.source.guard_source
            or is_dynamic_source(source.name)
            or not _has_same_treatment(value, argument.example)
            or not _is_static(symbolic)
        ):
            return None
        value._dynamo_static_input_type = "unguarded"
        symbolic = _copy_symbolic_context(symbolic, source)
        with enable_python_dispatcher():
            fake = output.fake_mode.from_tensor(value, source=source, symbolic_context=symbolic)
        note(source, value, symbolic, fake)
        name = re.sub(r"[^a-zA-Z0-9]+", "_", source.name)
        proxy = output.root_tracer.create_graph_input(name, type(value), fake, source=source)
        variable = known.clone(proxy=proxy, source=source, mutation_type=None)
        effects._track_obj(proxy, variable, mutation_type_cls=AttributeMutationNew)
        effects.track_object_existing(value, variable)
        guarded = source
        if is_dtensor(value):
            # Its type and specification are guarded like those of the other one, as with all module reads.
            guarded = AttrSource(source, "_local_tensor")
            note(guarded, local_of(value), symbolic.inner_contexts["_local_tensor"], local_of(fake))
        check = functools.partial(GuardBuilder.TENSOR_MATCH, value=TensorWeakRef(local_of(value)))
        output.guards.add(Guard(guarded, check, user_stack=stack), collect_debug_stack=False)
        output.current_tracer.traced_sources.add(source)
        output.input_source_to_var[source] = output.variable_tracker_cache[source] = variable
        proxy.node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
        proxy.node.meta["grapharg"] = GraphArg(source, value, False, fake)
        return variable

    return make


def is_guarded(tx: Any, source: Any) -> bool:
    """Whether the tensor at a source is a graph input, or the local tensor of one, and has its guard."""
    return source in tx.output.input_source_to_sizes_strides


def _has_same_treatment(value: Any, other: Any) -> bool:
    """Whether Dynamo makes the same decisions for both parameters."""
    if not is_dtensor(value):
        return type(value) is torch.nn.Parameter and value.dim() > 0 and _has_same_metadata(value, other)
    local, others = local_of(value), local_of(other)
    return (
        _has_same_metadata(value, other, {"_local_tensor", "_spec", "_is_param"})
        and value._spec == other._spec
        and getattr(value, "_is_param", False) is getattr(other, "_is_param", False) is True
        and type(local) is torch.Tensor
        and _has_same_metadata(local, others)
    )


def _has_same_metadata(value: Any, other: Any, own: Set[str] = frozenset()) -> bool:
    """Whether two tensors have the same type and metadata.

    Args:
        value: a tensor that may not be an input yet.
        other: a tensor that is an input.
        own: attributes that either may have in addition.
    """
    return (
        type(value) is type(other)
        and value.shape == other.shape
        and value.stride() == other.stride()
        and value.storage_offset() == other.storage_offset() == 0
        and value.dtype == other.dtype
        and value.device == other.device
        and value.requires_grad == other.requires_grad
        and value.is_leaf
        and not value._is_view()
        and value.grad is None
        and other.grad is None
        and dispatch_keys(value) == dispatch_keys(other)
        and _marks(value, own).items() <= _MARKS.items()
        and _marks(other, own).items() <= _MARKS.items()
    )


def _marks(value: Any, own: Set[str]) -> dict[str, Any]:
    return {name: mark for name, mark in value.__dict__.items() if name not in own}


def _copy_symbolic_context(symbolic: Any, source: Any) -> Any:
    """Copy a symbolic context for static sizes to another source."""
    inner = {
        name: _copy_symbolic_context(context, AttrSource(source, name)) if context is not None else None
        for name, context in getattr(symbolic, "inner_contexts", {}).items()
    }
    more = {"inner_contexts": inner} if inner else {}
    return dataclasses.replace(symbolic, tensor_source=source, shape_env_to_source_to_symbol_cache={}, **more)


DESCRIBES_SIZES = (StatefulSymbolicContext, SubclassSymbolicContext)
"""The kinds of context that describe which sizes of an input are symbolic."""

_MARKS = {"_dynamo_static_input_type": "unguarded"}
"""Dynamo's marks on a parameter that is a graph input."""


def _is_static(symbolic: Any) -> bool:
    """Whether no size of a tensor is symbolic or constrained."""
    return (
        type(symbolic) in DESCRIBES_SIZES
        and symbolic.view_base_context is None
        and not any((*symbolic.constraint_sizes, *symbolic.constraint_strides))
        and all(size is DimDynamic.STATIC for size in symbolic.dynamic_sizes)
        and all(_is_static(inner) for inner in getattr(symbolic, "inner_contexts", {}).values() if inner)
    )
