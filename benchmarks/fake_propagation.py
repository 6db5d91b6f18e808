"""Propagation over a GPT's joint graph: cold cache, new graph, known graph, and many layers against one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from functorch.compile import default_partition
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode as TorchFakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp as TorchFakeTensorProp

import fake
from benchmarks._fake_support import GPT, interleave, parser, report, tokens
from fake import FakeTensorMode, FakeTensorProp


def joint_graph(layers: int) -> torch.fx.GraphModule:
    """Return the forward and backward of a GPT as one graph, as AOTAutograd produces it."""
    kept: list[torch.fx.GraphModule] = []

    def keep(joint: Any, inputs: Any, **options: Any) -> Any:
        kept.append(copy.deepcopy(joint))
        return default_partition(joint, inputs, **options)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=lambda g, _: g, bw_compiler=lambda g, _: g, partition_fn=keep)
    torch.compile(GPT(layers), backend=backend)(tokens(), tokens())
    graph = kept[0]
    graph.graph._codegen = torch.fx.graph.CodeGen()
    graph.recompile()
    return graph


def inputs(graph: torch.fx.GraphModule, mode: Any) -> list[Any]:
    """Return fake inputs like those that the graph was captured with."""
    values = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    with mode:
        return [
            torch.empty_strided(tuple(v.shape), v.stride(), dtype=v.dtype, device=v.device)
            if isinstance(v, torch.Tensor)
            else v
            for v in values
        ]


def main(argv: list[str]) -> int:
    """Run the benchmark."""
    options = parser(__doc__, layers=12, rounds=5).parse_args(argv)
    torch.set_num_threads(1)
    graph = joint_graph(options.layers)
    print(f"{len(graph.graph.nodes)} nodes")
    torch_mode = TorchFakeTensorMode()
    torch_inputs = inputs(graph, torch_mode)
    mode = FakeTensorMode()
    given = inputs(graph, mode)

    def torchs() -> None:
        TorchFakeTensorProp(graph, torch_mode).propagate_dont_convert_inputs(*torch_inputs)

    def torchs_cold() -> None:
        TorchFakeTensorMode.cache_clear()
        torchs()

    def known() -> None:
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*given)

    def new_inputs() -> None:
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*inputs(graph, mode))

    def new_graph() -> None:
        other = FakeTensorMode()
        FakeTensorProp(graph, other).propagate_dont_convert_inputs(*inputs(graph, other))

    def cold() -> None:
        fake.cache_clear()
        new_graph()

    def known_again() -> None:
        for _ in range(10):
            known()

    times = interleave(options.rounds, torchs=torchs, new_graph=new_graph, new_inputs=new_inputs)
    known()
    warm = interleave(options.rounds, known=known_again)["known"]
    cold_times = interleave(options.rounds, torchs=torchs_cold, ours=cold)
    report("cold cache", cold_times["torchs"], cold_times["ours"])
    report("warm cache, new graph and mode", times["torchs"], times["new_graph"])
    report("known graph, other inputs", times["torchs"], times["new_inputs"])
    report("known graph, same inputs", times["torchs"], [t / 10 for t in warm])
    one = joint_graph(1)

    def cold_on(module: torch.fx.GraphModule) -> None:
        fake.cache_clear()
        other = FakeTensorMode()
        FakeTensorProp(module, other).propagate_dont_convert_inputs(*inputs(module, other))

    layers = interleave(options.rounds, many=lambda: cold_on(graph), one=lambda: cold_on(one))
    ratio = sorted(layers["many"])[options.rounds // 2] / sorted(layers["one"])[options.rounds // 2]
    print(f"{options.layers} layers cost {ratio:.2f} x one layer, both with a cold cache")
    return 0
