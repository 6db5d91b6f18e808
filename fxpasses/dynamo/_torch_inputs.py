"""Graph inputs for parameters, made like the input of another parameter: private names of torch 2.13, as in ``_torch.py``.

Dynamo asks some forty questions before it makes a graph input of a tensor: whether it is a view, sparse, nested, a subclass, marked
as dynamic, on the storage of another input, and what a program may learn from its metadata. Each weight of a copied layer
equals the one of the traced layer in all that decides the answers; so its input, its variable and its guard are made like those.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.side_effects import AttributeMutationNew
from torch._dynamo.variables.builder import GraphArg, is_dynamic_source
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatefulSymbolicContext
from torch.utils.weak import TensorWeakRef

from fake.seam.dispatch import dispatch_keys, enable_python_dispatcher
from fake.seam.dynamo import TensorVariable
from fake.seam.guards import Guard, TracingContext


def inputs_like(tx: Any) -> Callable[[Any, Any, fx.Node], Any]:
    """Gives a function ``(source, value, input)`` for the call that Dynamo traces now: the variable of a parameter that is an
    input of the graph from now on, made like another ``input``; None where it is no ordinary parameter or not like the other one.
    """
    output = tx.output
    effects, context, stack = output.side_effects, output.tracing_context, TracingContext.extract_stack()

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
            or not _decides_alike(value, argument.example)
            or not _is_static(symbolic)
        ):
            return None
        value._dynamo_static_input_type = "unguarded"
        symbolic = dataclasses.replace(symbolic, tensor_source=source, shape_env_to_source_to_symbol_cache={})
        with enable_python_dispatcher():
            fake = output.fake_mode.from_tensor(value, source=source, symbolic_context=symbolic)
        context.tensor_to_context[value] = symbolic
        output.input_source_to_sizes_strides[source] = {"size": fake.size(), "stride": fake.stride()}
        output.tracked_fakes_id_to_source[id(value)].append(source)
        name = re.sub(r"[^a-zA-Z0-9]+", "_", source.name)
        proxy = output.root_tracer.create_graph_input(name, type(value), fake, source=source)
        variable = known.clone(proxy=proxy, source=source, mutation_type=None)
        effects._track_obj(proxy, variable, mutation_type_cls=AttributeMutationNew)
        effects.track_object_existing(value, variable)
        check = functools.partial(GuardBuilder.TENSOR_MATCH, value=TensorWeakRef(value))
        output.guards.add(Guard(source, check, user_stack=stack), collect_debug_stack=False)
        output.current_tracer.traced_sources.add(source)
        output.input_source_to_var[source] = output.variable_tracker_cache[source] = variable
        proxy.node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
        proxy.node.meta["grapharg"] = GraphArg(source, value, False, fake)
        return variable

    return make


def _decides_alike(value: Any, other: Any) -> bool:
    """Whether both are parameters that Dynamo asks the same of, and answers the same for."""
    return (
        type(value) is type(other) is torch.nn.Parameter
        and value.dim() > 0
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
        and value.__dict__.items() <= _MARKS.items()
        and other.__dict__ == _MARKS
    )


_MARKS = {"_dynamo_static_input_type": "unguarded"}
"""What Dynamo notes on a parameter that is an input of a graph."""


def _is_static(symbolic: Any) -> bool:
    """Whether no size of a tensor was made symbolic, and nobody constrained one."""
    return (
        type(symbolic) is StatefulSymbolicContext
        and symbolic.view_base_context is None
        and not any((*symbolic.constraint_sizes, *symbolic.constraint_strides))
        and all(size is DimDynamic.STATIC for size in symbolic.dynamic_sizes)
    )
