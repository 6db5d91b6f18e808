"""Compile with our partition function, and with compilers that run the graphs unchanged."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from functorch.compile import make_boxed_func
from torch._functorch.aot_autograd import aot_module_simplified

from fxpasses.dynamo.tracing import accelerated
from fxpasses.partitioner import META_KEY, PartitionReport, partition


@dataclasses.dataclass
class Split:
    """One call of the partition function."""

    joint: fx.GraphModule
    forward: fx.GraphModule
    backward: fx.GraphModule
    num_fwd_outputs: int
    static_input_indices: list[int]

    @property
    def report(self) -> PartitionReport:
        return self.forward.meta[META_KEY]

    def saved_names(self) -> list[str]:
        (output,) = self.forward.graph.find_nodes(op="output")
        return [node.name for node in output.args[0][self.num_fwd_outputs :]]


def compile_split(
    model: Callable[..., Any],
    *,
    memory_budget: float | None = 1.0,
    dynamic: bool | None = False,
    decompositions: dict[Any, Any] | None = None,
) -> tuple[Callable[..., Any], list[Split]]:
    """`model` compiled through AOTAutograd, and the list that its splits are put in."""
    splits: list[Split] = []

    def partition_and_record(joint: fx.GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
        before = fx.GraphModule(joint, copy.deepcopy(joint.graph))
        forward, backward = partition(joint, joint_inputs, memory_budget=memory_budget, **kwargs)
        indices = kwargs.get("static_lifetime_input_indices") or []
        splits.append(Split(before, forward, backward, kwargs["num_fwd_outputs"], indices))
        return forward, backward

    def run_as_is(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return make_boxed_func(graph)

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with accelerated(True):  # same graphs, less time
            return aot_module_simplified(
                graph,
                inputs,
                fw_compiler=run_as_is,
                bw_compiler=run_as_is,
                partition_fn=partition_and_record,
                decompositions=decompositions,
            )

    torch._dynamo.reset()
    return torch.compile(model, backend=backend, dynamic=dynamic), splits
