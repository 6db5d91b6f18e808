"""Our partitioner against torch's min-cut partitioner: bytes saved and seconds, on the same joint graphs.

``python -m benchmarks partition [--repeats N] [--layers N] [--budgets]``. Both partitioners take turns in one
process, on fresh copies of each joint graph. Seconds are medians of the CPU time of that process: both run in
one thread, and wall time would include other load on the machine. Bytes are those of the tensors saved
between the two graphs, by torch's own measure, without parameters and buffers.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from functorch.compile import make_boxed_func
from rich.console import Console
from rich.table import Table
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from fxpasses.partitioner import META_KEY, partition
from fxpasses.partitioner.cost import CostModel
from tests.fxpasses.partitioner.models import GPT, ConvNet, EncoderDecoder

Partitioner = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


class JointGraphCapture:
    """Capture the joint graph that AOTAutograd passes to a partition function under Inductor."""

    def __init__(self, model: torch.nn.Module, inputs: Sequence[torch.Tensor], dynamic: bool) -> None:
        def take(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            self.joint = fx.GraphModule(joint, copy.deepcopy(joint.graph))
            self.options = {"num_fwd_outputs": kwargs["num_fwd_outputs"]}
            self.options["static_lifetime_input_indices"] = kwargs.get("static_lifetime_input_indices")
            return default_partition(joint, joint_inputs, **kwargs)

        def run_as_is(graph: fx.GraphModule, _: Sequence[Any]) -> Any:
            return make_boxed_func(graph)

        def backend(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
            return aot_module_simplified(
                graph,
                example_inputs,
                fw_compiler=run_as_is,
                bw_compiler=run_as_is,
                partition_fn=take,
                decompositions=select_decomp_table(),
            )

        torch._dynamo.reset()
        torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True)(*inputs)

    def run(self, partitioner: Partitioner, **options: Any) -> tuple[float, fx.GraphModule, fx.GraphModule]:
        """Partition a fresh copy. Return the CPU seconds and the two modules."""
        joint = fx.GraphModule(self.joint, copy.deepcopy(self.joint.graph))
        start = time.process_time()
        forward, backward = partitioner(joint, (), **self.options, **options)
        return time.process_time() - start, forward, backward

    def saved_bytes(self, forward: fx.GraphModule) -> int:
        """Return the bytes of the saved tensors that are not parameters or buffers."""
        placeholders = forward.graph.find_nodes(op="placeholder")
        static = {placeholders[i].name for i in self.options["static_lifetime_input_indices"] or ()}
        (output,) = forward.graph.find_nodes(op="output")
        saved = output.args[0][self.options["num_fwd_outputs"] :]
        cost = CostModel()
        return sum(cost.bytes_of(node) for node in saved if node.name not in static)


def flops_in_both(forward: fx.GraphModule, backward: fx.GraphModule) -> int:
    """Return the FLOPs of the operations that run in both passes."""
    once = {node.name for node in forward.graph.nodes if node.op == "call_function"}
    cost = CostModel()
    return sum(cost.flops_of(n) for n in backward.graph.nodes if n.op == "call_function" and n.name in once)


def models(layers: int) -> dict[str, tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]:
    """Return the models to measure, with their inputs."""
    return {
        f"GPT, {layers} layers": (GPT(layers, 64, 4), (torch.randint(0, 256, (4, 48)),)),
        f"residual convnet, {layers} blocks": (ConvNet(layers, 16), (torch.randn(4, 3, 32, 32),)),
        f"encoder/decoder, {layers // 2} + {layers // 2} layers": (
            EncoderDecoder(32, layers // 2),
            (torch.randn(4, 12, 32), torch.randn(4, 10, 32)),
        ),
    }


def compare(repeats: int, layers: int, console: Console) -> Table:
    """Compare bytes and seconds of both partitioners at a budget of 1."""
    table = Table(
        "model", "shapes", "nodes", "bytes, torch", "ours", "ratio", "seconds, torch", "ours", "ratio"
    )
    for name, (model, inputs) in models(layers).items():
        for dynamic in (False, True):
            console.log(f"{name}, {'dynamic' if dynamic else 'static'}: capturing")
            capture = JointGraphCapture(model, inputs, dynamic)
            seconds: dict[str, list[float]] = {"torch": [], "ours": []}
            size: dict[str, int] = {}
            for _ in range(repeats):
                for who, partitioner in (("torch", min_cut_rematerialization_partition), ("ours", partition)):
                    taken, forward, _ = capture.run(partitioner)
                    seconds[who].append(taken)
                    size[who] = capture.saved_bytes(forward)
            console.log(size, seconds)
            median = {who: statistics.median(values) for who, values in seconds.items()}
            table.add_row(
                name,
                "dynamic" if dynamic else "static",
                str(len(capture.joint.graph.nodes)),
                f"{size['torch']:,}",
                f"{size['ours']:,}",
                f"{size['ours'] / size['torch']:.3f}",
                f"{median['torch']:.3f}",
                f"{median['ours']:.3f}",
                f"{median['ours'] / median['torch']:.2f}",
            )
    return table


def sweep(layers: int, budgets: Sequence[float]) -> Table:
    """Compare what both partitioners save and recompute as the budget falls."""
    columns = "model", "budget", "bytes: bound", "torch", "ours", "FLOPs again: torch", "ours"
    table = Table(*columns, "seconds: torch", "ours")
    for name, (model, inputs) in models(layers).items():
        capture = JointGraphCapture(model, inputs, dynamic=False)
        for budget in budgets:
            with torch._functorch.config.patch(activation_memory_budget=budget):
                theirs_seconds, *theirs = capture.run(min_cut_rematerialization_partition)
            ours_seconds, *ours = capture.run(partition, memory_budget=budget)
            report = ours[0].meta[META_KEY]
            zero = report.bytes_at_zero_budget or 0
            table.add_row(
                name,
                f"{budget:g}",
                f"{zero + budget * (report.bytes_at_full_budget - zero):,.0f}",
                f"{capture.saved_bytes(theirs[0]):,}",
                f"{capture.saved_bytes(ours[0]):,}",
                f"{flops_in_both(*theirs):,}",
                f"{flops_in_both(*ours):,}",
                f"{theirs_seconds:.3f}",
                f"{ours_seconds:.3f}",
            )
    return table


def main(arguments: Sequence[str]) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks partition")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--budgets", action="store_true", help="a sweep over memory budgets instead")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    console = Console(width=140)
    if options.budgets:
        console.print(sweep(options.layers, (1.0, 0.9, 0.75, 0.5, 0.25, 0.1, 0.0)))
    else:
        console.print(compare(options.repeats, options.layers, console))
    return 0
